"""Which fields the bodies of requests may have: ours, on routes that take them, and none that only the server sets."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sglang_lazy.core.names import check_name

FIELDS = ("segments", "link", "cache_salt", "chunk_separator", "chunk_roles")
SIMILAR = 0.77
"""From this `difflib` ratio on, one name misspells the other."""
FORMER = {"salt": "cache_salt"}
"""Former names of fields."""

_ROUTER = "a router of disaggregated servers names the peer with it"
_SCORING = "scoring sets it, to positions of the prompt that it has built"
_ENCODERS = "the server counts what it has sent to encoders"
SERVER_FIELDS = {
    "lora_id": "the server looks it up by lora_path; another one is of no adapter, and ends the scheduler",
    "http_worker_ipc": "the socket of the tokenizer worker that gets the answer",
    "received_time": "the server's clock, from which its metrics are computed",
    "external_trace_header": "the server reads it from the request's headers",
    "return_bytes": "internal, for generated images",
    "positional_embed_overrides": "tensors, which only Python can make",
    "multi_item_delimiter_indices": _SCORING,
    "token_indices_to_pool": _SCORING,
    "decision_layout": _SCORING,
    "kv_hints": "a trusted orchestrator's, which nothing tells from a client",
    "mm_hashes": "whoever names an image's hash names the KV that answers it, for all who send that image",
    "bootstrap_host": _ROUTER,
    "bootstrap_port": _ROUTER,
    "bootstrap_room": _ROUTER,
    "bootstrap_pair_key": _ROUTER,
    "decode_tp_size": _ROUTER,
    "disagg_prefill_dp_rank": _ROUTER,
    "need_wait_for_mm_inputs": _ENCODERS,
    "num_items_assigned": _ENCODERS,
    "encoder_urls": _ENCODERS,
}
"""By field of a request, why no client may set it. Python may: `Engine` serves its own process."""
INTERNAL_PARAMS = ("stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized")
"""Sampling parameters that SGLang fills in itself: with `is_normalized`, it would skip that for all others."""

_NAMES = ("rid", "session_id", "conversation_id", "routing_key", "lora_path", "extra_key", "cache_salt")
"""Fields with a name, or one for each prompt of a batch."""
_NEVER_EMPTY = ("rid", "cache_salt")
"""Names that, empty, would be used, or leave a tenant in everybody's namespace. Others are none then."""


def check_names(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a name that is not printable.  given: a request's fields."""
    for name in _NAMES:
        value = given.get(name)
        for one in value if isinstance(value, list) else (value,):
            if one or name in _NEVER_EMPTY and one is not None:
                check_name(name, one)


def check_body(body: Mapping[str, Any], known: Collection[str], defaults: Mapping[str, Any], has_router: bool) -> None:
    """Raise ValueError for a field that is the server's, or one of ours that the route would ignore.

    known: fields of the route.  defaults, has_router: see `refuse_server_fields`.
    """
    check_fields(body, known)
    if isinstance(extra := body.get("extra_body"), Mapping) and any(name in FIELDS for name in extra):
        raise ValueError("extra_body is an argument of OpenAI's client: in JSON, its fields are those of the body")
    for fields in (body, body.get("parameters")):  # as Vertex AI calls those of `/generate`
        if isinstance(fields, Mapping):
            refuse_server_fields(fields, defaults, has_router)


def refuse_server_fields(given: Mapping[str, Any], defaults: Mapping[str, Any], has_router: bool) -> None:
    """Raise ValueError if a client has set a field that only the server may set.

    given: the request's body; null and a field's default count as not set.
    defaults: of the fields in SERVER_FIELDS.  has_router: whether a router of disaggregated servers is the client.
    """
    for name in defaults.keys() & given.keys():
        if given[name] is None or given[name] is defaults[name]:
            continue
        if SERVER_FIELDS[name] is _ROUTER and has_router:
            continue
        raise ValueError(f"{name} is set by the server, not by clients: {SERVER_FIELDS[name]}")


def check_fields(given: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for a field that a route would ignore although it is one of ours, or nearly so.

    given: names in the body.  known: fields of the route's API, which are never refused. Others are left to SGLang,
    which ignores what it does not know: a misspelt `link` would be answered under another policy, a misspelt
    `cache_salt` from everybody's cache.
    """
    for name in given:
        if name in known:
            continue
        if name == "segments":
            raise ValueError(
                "segments are for /generate and /v1/completions; in a chat, chunks are content parts "
                '{"type": "chunk", "text": "..."}'
            )
        if name in FIELDS:
            raise ValueError(f"{name} is not a field of this route")
        if (meant := FORMER.get(name) or nearest(name)) is not None:
            hint = f"did you mean {meant!r}?" if meant in known else f"{meant!r} is not a field of this route either"
            raise ValueError(f"unknown field {name!r:.50}: {hint}")


def nearest(name: str) -> str | None:
    """The field of ours that `name` misspells, None if it is like none of them.

    Case and punctuation do not count. A wrong letter makes another word of a short name, such as `line`.
    """
    if not 3 <= len(name) <= 20:
        return None
    plain = _letters(name)
    return next((field for field in FIELDS if _is_near(plain, _letters(field))), None)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _is_near(name: str, field: str) -> bool:
    return sorted(name) == sorted(field) or difflib.SequenceMatcher(None, name, field).ratio() >= SIMILAR

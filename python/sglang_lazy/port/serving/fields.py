"""Fields of SGLang's requests: their types, which of them only the server sets, and which a route would ignore.

SGLang checks ranges but not types, and values of other types end its scheduler or detokenizer. Types are read from
SGLang's own classes, so a field that a later release adds is converted as well.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Request
from pydantic import BaseModel
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.core.names import check_name
from sglang_lazy.serving.conversion import Fields, Parameters, types_of
from sglang_lazy.serving.fields import FIELDS, check_fields

_NAMES = ("rid", "session_id", "conversation_id", "routing_key", "lora_path", "extra_key", "cache_salt")
"""Fields with a name, or one for each prompt of a batch."""
_PROMPT = {"text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data"}
"""Fields that are not converted: they may be long, and are read before a request leaves this process."""
_OWN_CHECKS = _PROMPT | {"sampling_params", "session_params"}
"""Fields that are checked elsewhere."""
_NEVER_EMPTY = ("rid", "cache_salt")
"""Names that, empty, would be used, or leave a tenant in everybody's namespace. Others are none then."""

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

_DEFAULTS = {
    field.name: field.default
    for kind in (EmbeddingReqInput, GenerateReqInput)
    for field in dataclasses.fields(kind)
    if field.name in SERVER_FIELDS
}
_SESSION = Parameters(types_of(SessionParams))
_SAMPLING = Parameters(
    {
        **{name: kind for name, kind in types_of(SamplingParams).items() if name not in INTERNAL_PARAMS},
        "stop_token_ids": list[int | None] | None,  # SGLang skips nulls
        "custom_params": dict | None,  # may hold anything, since SGLang's processes exchange pickles by default
    },
    wide=("sampling_seed",),
    free=("custom_params",),
)


def convert_request(obj: Any) -> None:
    """Convert the fields of a `GenerateReqInput` or `EmbeddingReqInput` in place.

    Raises ValueError, naming the field, for a value of another type, a number of more than 64 bits, and a name that is
    not printable.
    """
    kind: type = type(obj)
    _convertible(kind).convert(obj)
    for name in _NAMES:
        value = vars(obj).get(name)
        for one in value if isinstance(value, list) else (value,):
            if one or name in _NEVER_EMPTY and one is not None:
                check_name(name, one)
    if getattr(obj, "session_params", None) is not None:
        obj.session_params = _SESSION.convert("session_params", obj.session_params)
    obj.sampling_params = convert_sampling_params(obj.sampling_params)


@functools.cache
def _convertible(kind: Any) -> Fields:
    return Fields(kind, _OWN_CHECKS)


def convert_sampling_params(params: Any) -> Any:
    """A copy of `params` with values of the types that SGLang declares.

    params: one object, or a list of them for a batch; None means a parameter's default. Raises ValueError, naming the
    parameter, if it is unknown or of another type.
    """
    if params is None:
        return None
    if not isinstance(params, list | tuple):
        return _SAMPLING.convert("sampling_params", params)
    if not params:
        raise ValueError("sampling_params is an empty list")
    return [one if one is None else _SAMPLING.convert("sampling_params", one) for one in params]


def refuse_server_fields(given: Mapping[str, Any], server_args: Any) -> None:
    """Raise ValueError if a client has set a field that only the server may set.

    given: the request's body; null and a field's default count as not set.
    """
    for name in _DEFAULTS.keys() & given.keys():
        if given[name] is None or given[name] is _DEFAULTS[name]:
            continue
        if SERVER_FIELDS[name] is _ROUTER and server_args.disaggregation_mode != "null":
            continue
        raise ValueError(f"{name} is set by the server, not by clients: {SERVER_FIELDS[name]}")


async def check_body(request: Request, kind: type) -> None:
    """Raise ValueError for a field that is the server's, or one of ours that the route would ignore.

    kind: the class of the route's bodies.
    """
    body = await request.json()  # read already, and kept
    if not isinstance(body, Mapping):
        return
    check_fields(body, _fields_of(kind))
    if isinstance(extra := body.get("extra_body"), Mapping) and any(name in FIELDS for name in extra):
        raise ValueError("extra_body is an argument of OpenAI's client: in JSON, its fields are those of the body")
    for fields in (body, body.get("parameters")):  # as Vertex AI calls those of `/generate`
        if isinstance(fields, Mapping):
            refuse_server_fields(fields, http_server.get_global_state().tokenizer_manager.server_args)


@functools.cache
def _fields_of(kind: Any) -> frozenset[str]:
    if issubclass(kind, BaseModel):
        return frozenset(kind.model_fields)
    if issubclass(kind, msgspec.Struct):
        return frozenset(kind.__struct_fields__)
    return frozenset(field.name for field in dataclasses.fields(kind))

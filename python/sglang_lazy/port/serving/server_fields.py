"""Fields of SGLang's requests that only the server sets. From a client they are refused, whatever its route."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput

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

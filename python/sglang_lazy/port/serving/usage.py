"""Tokens reused from chunks in SGLang's OpenAI usage models, and in its counter of cached tokens."""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, Field
from sglang.srt.entrypoints.openai import protocol

from sglang_lazy.port.hooks import Hooks
from sglang_lazy.serving.results import CachedTokens

HOOKS = Hooks()


def extend_protocol() -> None:
    """Add `chunk_tokens` to usage details and `chunk` to sglext details; answers omit them if None."""
    added = ((protocol.PromptTokensDetails, "chunk_tokens"), (protocol.CachedTokensDetails, "chunk"))
    if all(name in model.model_fields for model, name in added):
        return
    for model, name in added:
        field: Any = Field(default=None, exclude_if=lambda value: value is None)
        field.annotation = int | None
        model.model_fields[name] = field
    for model in vars(protocol).values():
        if isinstance(model, type) and issubclass(model, BaseModel) and model is not BaseModel:
            model.model_rebuild(force=True)


@HOOKS.on("sglang.srt.entrypoints.openai.protocol.PromptTokensDetails").feature(
    "__init__", "AFTER", "usage tells tokens of reused chunks"
)
def usage_details(_result: Any, details: Any, cached_tokens: Any = 0, **_counts: Any) -> None:
    """Add how many of the cached tokens were reused from chunks."""
    if isinstance(cached_tokens, CachedTokens):
        details.chunk_tokens = cached_tokens.chunk


@HOOKS.on("sglang.srt.entrypoints.openai.utils").feature(
    "cached_tokens_details_from_dict", "AFTER", "usage tells tokens of reused chunks"
)
def cached_tokens_details(details: Any, raw: dict[str, Any]) -> Any:
    """Copy the part from chunks."""
    details.chunk = raw.get("chunk")
    return details


@HOOKS.on("sglang.srt.observability.metrics_collector.TokenizerMetricsCollector").feature(
    "observe_one_finished_request", "AROUND", "reused chunks are a source of cached tokens of their own"
)
def observe_one_finished_request(
    original: Callable,
    collector: Any,
    labels: Mapping[str, str],
    prompt_tokens: int,
    generation_tokens: int,
    cached_tokens: int,
    e2e_latency: float,
    has_grammar: bool,
    cached_tokens_details: Mapping[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Around the method of `TokenizerMetricsCollector`: count tokens of chunks on the device under their own source, so
    that the sources of SGLang's counter of cached tokens still add up to its total."""
    details = cached_tokens_details
    if details is not None and "chunk" in details:
        on_device = details["chunk"] - details["host"] - details.get("storage", 0)
        details = {**details, "device": details["device"] - on_device}
        if on_device:
            collector.cached_tokens_total.labels(**labels, cache_source="chunk").inc(on_device)
    numbers = (prompt_tokens, generation_tokens, cached_tokens, e2e_latency, has_grammar, details)
    original(collector, labels, *numbers, *args, **kwargs)

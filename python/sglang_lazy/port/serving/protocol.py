"""Add fields for tokens reused from chunks to SGLang's OpenAI usage models."""

from typing import Any

from pydantic import BaseModel, Field
from sglang.srt.entrypoints.openai import protocol

from sglang_lazy.port.hooks import feature
from sglang_lazy.serving.results import CachedTokens


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


def usage_details(_result: Any, details: Any, cached_tokens: Any = 0, **_counts: Any) -> None:
    """After `PromptTokensDetails.__init__`: add how many of the cached tokens were reused from chunks."""
    if isinstance(cached_tokens, CachedTokens):
        details.chunk_tokens = cached_tokens.chunk


def cached_tokens_details(details: Any, raw: dict[str, Any]) -> Any:
    """After `cached_tokens_details_from_dict`: copy the part from chunks."""
    details.chunk = raw.get("chunk")
    return details


_OPENAI = "sglang.srt.entrypoints.openai"
HOOKS = (
    feature(
        f"{_OPENAI}.protocol.PromptTokensDetails.__init__",
        usage_details,
        "AFTER",
        "usage tells tokens of reused chunks",
    ),
    feature(
        f"{_OPENAI}.utils.cached_tokens_details_from_dict",
        cached_tokens_details,
        "AFTER",
        "usage tells tokens of reused chunks",
    ),
)

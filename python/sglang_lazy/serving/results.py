"""Results that say what was reused: `meta_info.link`, `meta_info.chunks`, cached token counts and OpenAI usage."""

from asyncio import Future
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.serving.requests import layout_of
from sglang_lazy.serving.shadow import shadowed

_REUSE_ATTR = "_sglang_lazy_reuse"

REQUEST_SENT: ContextVar[Future | None] = ContextVar("REQUEST_SENT", default=None)
"""Done when the one request that is being served in this context has gone to the scheduler."""


class CachedTokens(int):
    """A count of cached prompt tokens that remembers how many of them came from chunks, through sums too."""

    chunk: int

    def __new__(cls, total: int, chunk: int) -> "CachedTokens":
        self = super().__new__(cls, total)
        self.chunk = chunk
        return self

    def __add__(self, other: int) -> "CachedTokens":
        return CachedTokens(int(self) + int(other), self.chunk + getattr(other, "chunk", 0))

    __radd__ = __add__


def chunk_report(layout: PromptLayout, input_ids: list[int], hits: int) -> list[dict[str, Any]]:
    """One entry for each chunk of a prompt: id, tokens, offset, and whether bit i of `hits` marks chunk i."""
    return [
        {
            "id": chunk_id(tokens_digest(input_ids[start:end])),
            "tokens": end - start,
            "offset": start,
            "hit": bool(hits >> index & 1),
        }
        for index, (start, end) in enumerate(layout.chunks)
    ]


def report_chunks(wait: Callable, tokenizer_manager: Any, obj: Any, request: Any = None) -> AsyncIterator[dict]:
    """Hook around `TokenizerManager._wait_one_response`: add link and chunk report to a request's last output.

    It is called when the request has gone to the scheduler. One refused there raises ValueError in a stream too,
    so that surfaces can answer with an error.
    """
    sent = REQUEST_SENT.get()
    if sent is not None and not sent.done() and getattr(obj, "is_single", False):
        sent.set_result(None)
    outputs = wait(tokenizer_manager, obj, request)
    layout = layout_of(obj)
    if layout is None:
        return outputs
    states = tokenizer_manager.rid_to_state
    parent = states.get(tokenizer_manager.child_rid_to_logical_rid.get(obj.rid))
    return shadowed(_report(outputs, layout, obj, parent), tokenizer_manager, obj, layout, states.get(obj.rid))


async def _report(outputs: AsyncIterator[dict], layout: PromptLayout, obj: Any, parent: Any) -> AsyncIterator[dict]:
    """parent: for n > 1, the state that the prompt's requests have in common, else None."""
    async with aclosing(outputs):
        async for out in outputs:
            _annotate(out["meta_info"], layout, obj, parent)
            yield out


def _annotate(meta_info: dict[str, Any], layout: PromptLayout, obj: Any, parent: Any) -> None:
    """Turn the scheduler's bitmask of hits into a report."""
    finish_reason = meta_info["finish_reason"]
    refused = finish_reason is not None and finish_reason.get("status_code") == HTTPStatus.BAD_REQUEST
    if refused and (parent is not None or getattr(obj, "is_single", False)):  # not where others share the stream
        raise ValueError(finish_reason["message"])
    if finish_reason is not None:
        meta_info["link"] = layout.link
    if layout.link == "full":
        return
    if "cached_tokens" not in meta_info:
        return  # it was aborted or timed out in the waiting queue: SGLang reports no counts
    details = dict(meta_info.get("cached_tokens_details") or {})
    reuse = (meta_info["cached_tokens"], int(details.pop("chunk_hits", "0"), 16), details)
    if parent is not None:
        # SGLang computes the prompt before its n samples: what that request reused is what the samples may report.
        reuse = vars(parent).setdefault(_REUSE_ATTR, reuse)
    cached_tokens, hits, details = reuse
    meta_info["cached_tokens"] = CachedTokens(cached_tokens, details.get("chunk", 0))
    meta_info["cached_tokens_details"] = dict(details) or None
    if finish_reason is not None:
        meta_info["chunks"] = chunk_report(layout, obj.input_ids, hits)


def extend_protocol() -> None:
    """Give SGLang's OpenAI usage models a field for reuse from chunks. Left out of answers where there is none."""
    from pydantic import BaseModel, Field
    from sglang.srt.entrypoints.openai import protocol

    added = ((protocol.PromptTokensDetails, "chunk_tokens"), (protocol.CachedTokensDetails, "chunk"))
    if all(name in model.model_fields for model, name in added):
        return
    for model, name in added:
        field = Field(default=None, exclude_if=lambda value: value is None)
        field.annotation = int | None
        model.__pydantic_fields__[name] = field
    for model in vars(protocol).values():
        if isinstance(model, type) and issubclass(model, BaseModel) and model is not BaseModel:
            model.model_rebuild(force=True)


def usage_details(details: Any, count: int) -> Any:
    """Hook after `UsageProcessor._details_if_cached`: say how much of the reuse came from chunks."""
    if details is not None and isinstance(count, CachedTokens):
        details.chunk_tokens = count.chunk
    return details


def cached_tokens_details(details: Any, raw: dict[str, Any]) -> Any:
    """Hook after `cached_tokens_details_from_dict`: keep the part from chunks."""
    details.chunk = raw.get("chunk")
    return details

"""Reports of reuse in results: `meta_info.link`, `meta_info.chunks`, cached token counts and OpenAI usage."""

import dataclasses
import time
from collections.abc import AsyncGenerator, Hashable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from sglang_lazy.chunks.catalog import tenant_of
from sglang_lazy.core.keys import Namespace, chunk_id, digests
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.serving.misses import Answered, Misses, Terms
from sglang_lazy.serving.picker import Pick, learning
from sglang_lazy.serving.plans import PackedPlan, Plan, packed_in
from sglang_lazy.serving.usage import Usage

MAX_RID = 200
"""Longer ids of requests are not remembered, in characters."""


class CachedTokens(int):
    """A count of cached prompt tokens that remembers, through sums too, how many of them came from chunks."""

    chunk: int

    def __new__(cls, total: int, chunk: int) -> "CachedTokens":
        self = super().__new__(cls, total)
        self.chunk = chunk
        return self

    # What `__new__` takes, for copies; typeshed fixes the length of the tuple for int.
    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.chunk

    def __add__(self, other: int) -> "CachedTokens":
        return CachedTokens(int(self) + int(other), self.chunk + getattr(other, "chunk", 0))

    __radd__ = __add__


def chunk_report(
    layout: PromptLayout, input_ids: list[int], hits: int, parts: Mapping[int, int] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Per chunk of a prompt: id, tokens, offset, whether it was cached, and how many of its tokens were reused.

    hits: bit i is set if chunk i was cached.  parts: by index, how many tokens of these were reused, of others all.
    """
    names = digests(input_ids, layout.chunks)
    return [
        {
            "id": chunk_id(digest),
            "tokens": end - start,
            "offset": start,
            "hit": bool(hits >> index & 1),
            "reused_tokens": parts.get(index, end - start) if hits >> index & 1 else 0,
        }
        for index, ((start, end), digest) in enumerate(zip(layout.chunks, names, strict=True))
    ]


@dataclasses.dataclass(eq=False)
class SharedReport:
    """What the samples of a prompt report. SGLang computes the prompt before them, and they then find all of it cached:
    the first report counts.

    reuse: that report, None before it.  counted: the request whose end `Usage` has recorded, None before that.
    """

    reuse: tuple | None = None
    counted: "Served | None" = None


class OwnPlan(PackedPlan):
    """The packed plan of one request alone, with what this process knows of the request besides. The samples of a
    prompt, which SGLang makes as copies of its request, have it in common.

    pick: the rank that was chosen, and the names of the chunks there; None without a choice.
    report: what the samples report; None for the only one.
    """

    pick: tuple[Pick, list[Hashable]] | None = None
    report: SharedReport | None = None


def with_own_plan(params: dict[str, Any]) -> tuple[dict[str, Any], OwnPlan]:
    """The sampling parameters of a request with a plan, where it is the request's own, and this plan: prompts of a
    batch may share parameters."""
    packed = packed_in(params)
    assert packed is not None
    if isinstance(packed, OwnPlan):
        return params, packed
    own = OwnPlan(packed)
    own.plan = packed.plan
    return {**params, "custom_params": {**params["custom_params"], LAYOUT_PARAM: own}}, own


def report_in(params: Any) -> SharedReport | None:
    """What the samples of a prompt share, by its sampling parameters; None for the only one."""
    packed = packed_in(params)
    return packed.report if isinstance(packed, OwnPlan) else None


def learned(outputs: AsyncGenerator[dict, None], params: Any) -> AsyncGenerator[dict, None]:
    """`outputs` of a request, learning from its chunk report which chunks its rank had.  params: for sampling."""
    packed = packed_in(params)
    return learning(outputs, *packed.pick) if isinstance(packed, OwnPlan) and packed.pick is not None else outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """A request with a plan, which the scheduler has got.

    request: SGLang's, to be handed back to `Server`.
    input_ids, params: its prompt and its sampling parameters.
    extra_key: the client's key.  adapter: the id of its LoRA adapter, None without one.
    has_images: whether it has any.
    is_single: whether nothing else shares its stream.
    is_counted: whether it counts as traffic, as internal requests do not.
    shared: what the samples of its prompt share; None for the only one.
    """

    plan: Plan
    request: Any
    rid: str
    input_ids: list[int]
    params: dict[str, Any]
    extra_key: str | None = None
    adapter: str | None = None
    has_images: bool = False
    is_single: bool = True
    is_counted: bool = True
    shared: SharedReport | None = None


async def annotated(
    outputs: AsyncGenerator[dict, None], served: Served, usage: Usage, misses: Misses
) -> AsyncGenerator[dict, None]:
    """`outputs` of a request with a plan, with the scheduler's bit mask of hits turned into a report.

    usage: records the prompt, once, unless it is an internal one.
    misses: learns its chunks.
    Raises ValueError if the scheduler refused the request, unless other requests share the stream.
    """
    began = time.time()
    async with aclosing(outputs):
        async for out in outputs:
            if _annotate(out["meta_info"], served):
                _record(out["meta_info"], served, usage, misses, began)
            yield out


def _annotate(meta_info: dict[str, Any], served: Served) -> bool:
    """Add the report to an output. Returns whether it is the last one of a prompt, the first of several samples'."""
    layout, shared = served.plan.layout, served.shared
    finish_reason = meta_info["finish_reason"]
    refused = finish_reason is not None and finish_reason.get("status_code") == HTTPStatus.BAD_REQUEST
    if refused and (shared is not None or served.is_single):
        raise ValueError(finish_reason["message"])
    if finish_reason is not None and layout.chunks:
        meta_info["link"] = layout.link
    if not served.plan.policy.reuses:
        return False
    if "cached_tokens" not in meta_info:
        return False  # aborted or timed out in the waiting queue: SGLang reports no counts
    details = dict(meta_info.get("cached_tokens_details") or {})
    hits, parts = int(details.pop("chunk_hits", "0"), 16), details.pop("chunk_parts", "")
    reuse = (meta_info["cached_tokens"], hits, parts, details)
    if shared is not None:
        reuse = shared.reuse = shared.reuse or reuse
    cached_tokens, hits, parts, details = reuse
    # If chunks are outside the text (Comb), the scheduler's own count covers only the text.
    if "prompt" in details:
        meta_info["prompt_tokens"] = details["prompt"]
    meta_info["cached_tokens"] = CachedTokens(cached_tokens, details.get("chunk", 0))
    meta_info["cached_tokens_details"] = {name: n for name, n in details.items() if name != "prompt"} or None
    if finish_reason is None:
        return False
    pairs = (map(int, part.split(":")) for part in parts.split(",") if part)
    meta_info["chunks"] = chunk_report(layout, served.input_ids, hits, {index: n for index, n in pairs})
    if shared is not None:
        shared.counted = shared.counted or served
    return shared is None or shared.counted is served


def _record(meta_info: dict[str, Any], served: Served, usage: Usage, misses: Misses, began: float) -> None:
    """Record a prompt that has been answered.  began: when it was sent to the scheduler, seconds since the epoch."""
    layout, chunks, now = served.plan.layout, meta_info["chunks"], time.time()
    namespace = Namespace("chunk", served.extra_key, layout.cache_salt)
    rid = served.rid if len(served.rid) <= MAX_RID else None  # a client chooses it
    if served.is_counted:
        usage.add(namespace, layout.link, chunks, meta_info["cached_tokens"].chunk, now, rid or "")
    terms = Terms.of(served.adapter, served.plan.policy.preamble, served.input_ids[: layout.chunks[0][0]])
    asked = rid if served.is_counted else None
    misses.note(Answered(asked, tenant_of(namespace), terms, served.input_ids, chunks, began, now))

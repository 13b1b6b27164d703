"""Per-request state in SGLang's scheduler, all of it in one attribute: `req.lazy`.

It is a `LinkedRequest` for a linked request, an `Undecided` until its policy has chosen what to keep, a `Fill` for an
internal request that computes chunks, and absent for all others. What reports need to know of chunks that the policy
does not use at all is beside it (`unused_hits`), since such requests may be ordinary ones.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_lazy.core.fills import Fill
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.policy import Measure, Policy
from sglang_lazy.core.prompt import ChunkSlice, LinkedPrompt, Ranges
from sglang_lazy.core.request import Request
from sglang_lazy.core.row_order import Row
from sglang_lazy.core.segments import PromptLayout


@dataclasses.dataclass(eq=False)
class ChunkNodes:
    """The tree nodes of a linked request's chunks. Locked once, whether the waiting request, its row or both hold them.

    nodes: per slice, the tree node where its needed part ends; None while that is missing.
    spreads: per slice, `ChunkSlice.spread`.
    num_locks: the number of holders.
    """

    nodes: list[Any]
    spreads: list[int]
    num_locks: int = 0

    @classmethod
    def missing(cls, slices: Sequence[ChunkSlice]) -> "ChunkNodes":
        """For slices that have not been looked up yet, with one holder."""
        return cls([None] * len(slices), [chunk.spread for chunk in slices], num_locks=1)

    @property
    def found(self) -> list[tuple[Any, int]]:
        """The nodes and spreads of the slices that are not missing."""
        return [pair for pair in zip(self.nodes, self.spreads, strict=True) if pair[0] is not None]

    @property
    def complete(self) -> bool:
        return None not in self.nodes


@dataclasses.dataclass(eq=False)
class RowNodes:
    """All tree nodes that a row depends on. SGLang locks and unlocks it as the request's `last_node`.

    spans: per text span, the node where its cached part ends; for a fill, per part.
    spreads: per span, as in `Tree.lock`: a fill's pass has yet to read what the fill has published. None for all 0.
    num_locks: SGLang's locks. The nodes are locked once while there are any.
    used: whether the use of these nodes has been counted.
    slots: int64, of the row's cached part, until SGLang has written the row.
    """

    chunks: ChunkNodes
    spans: list[Any]
    spreads: list[int] | None = None
    num_locks: int = 0
    used: bool = False
    slots: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class Probe:
    """What an internal linked request measures for its parent: scores for each token of its slices.

    parent: the request whose policy chooses by the scores.
    query_start: text from this position on counts as the question.
    """

    parent: Request
    query_start: int
    _sums: dict[Measure, torch.Tensor] = dataclasses.field(default_factory=dict)
    _on_host: torch.Tensor | None = None
    _copied: Any = None

    def add(self, measure: Measure, scores: torch.Tensor) -> None:
        """Add the scores of one forward pass, float32 [num_chunk_tokens of its prompt]."""
        self._sums[measure] = self._sums[measure] + scores if measure in self._sums else scores

    def send(self) -> None:
        """Start copying the sums to the host, after the pass that completes them."""
        sums = torch.stack(list(self._sums.values()))
        on_gpu = sums.is_cuda
        # A copy into pageable memory would wait for the device.
        on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=on_gpu)
        self._on_host = on_host.copy_(sums, non_blocking=True)
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def result(self) -> dict[Measure, np.ndarray]:
        """The sums of each measure, float32 [num_chunk_tokens of its prompt]."""
        assert self._on_host is not None
        if self._copied is not None:
            self._copied.synchronize()
        return dict(zip(self._sums, self._on_host.numpy(), strict=True))


@dataclasses.dataclass(eq=False)
class LinkedRequest:
    """A request whose policy keeps KV of chunks.

    found: per slice, the tree node where it was cached on arrival, or None. Not locked, so it may be evicted.
    prefetched: per slice, whether a fetch from storage was started on arrival.
    chunks: the nodes of its chunks, locked while it waits; None while it holds none.
    row: the row's order; set when the request is matched for a batch.
    own: its policy's state while the request has a row.
    cross_slots: int32, the slots of its chunks, once it has a row, if the model reads them by cross-attention.
    reused: per slice, whether it was cached or stored on arrival, and has not been computed for this request since.
    loaded: per slice, whether it was loaded from the host for this request.
    found_text: tokens of each text namespace that were cached before its own fills or probe computed more.
    probe: what it measures; None for a user's request.
    ahead: as in `PromptLayout`.
    recurrent: whether the model has recurrent layers.
    waits_since: `time.perf_counter()` when it began to wait for nothing but its chunks; None before, and once it runs.
    """

    prompt: LinkedPrompt
    policy: Policy
    found: list[Any]
    prefetched: list[bool]
    chunks: ChunkNodes | None = None
    row: Row = dataclasses.field(init=False)
    own: Any = None
    cross_slots: torch.Tensor | None = None
    reused: list[bool] = dataclasses.field(init=False)
    loaded: list[bool] = dataclasses.field(init=False)
    found_text: dict[Namespace, int] = dataclasses.field(default_factory=dict)
    probe: Probe | None = None
    ahead: bool = False
    recurrent: bool = False
    waits_since: float | None = None

    def __post_init__(self):
        self.reused = [
            node is not None or prefetched for node, prefetched in zip(self.found, self.prefetched, strict=True)
        ]
        self.loaded = [False] * len(self.found)

    @functools.cached_property
    def num_known_tokens(self) -> int:
        """How many tokens it keeps of chunks that were cached or stored on arrival."""
        slices = zip(self.prompt.chunks, self.found, self.prefetched, strict=True)
        return sum(chunk.num_kept for chunk, node, prefetched in slices if node is not None or prefetched)

    @property
    def admitted(self) -> bool:
        """Whether its chunks are locked or being computed."""
        return self.chunks is not None

    @property
    def ready(self) -> bool:
        """Whether all its chunks are resident and locked."""
        return self.chunks is not None and self.chunks.complete

    @property
    def recomputes(self) -> bool:
        """Whether it is a probe that computes the whole prompt as plain text, to compare it with the cached chunks."""
        return self.probe is not None and "deviation" in self.policy.probes

    @property
    def needs_resident(self) -> bool:
        """Whether its forward pass must follow, not share, those that compute its chunks."""
        return self.policy.needs_resident or self.recomputes or self.recurrent

    @property
    def num_own_slots(self) -> int:
        """How many slots it needs in addition to those of its text."""
        return self.prompt.num_chunk_tokens if self.recomputes else self.policy.num_own_slots(self.prompt)

    @property
    def segments(self) -> tuple[ChunkSlice, ...]:
        """The slices in the row whose keys are rotated for positions within their chunks."""
        return self.prompt.in_row if self.policy.in_place and not self.recomputes else ()

    @property
    def read_in_place(self) -> tuple[ChunkSlice, ...]:
        """The slices whose shared slots attention reads, in the row or by cross-attention."""
        return self.prompt.chunks if self.prompt.cross else self.segments

    @property
    def num_reused_tokens(self) -> int:
        """Proxy chunk tokens that were not computed for this request."""
        return sum(chunk.num_kept for chunk, reused in zip(self.prompt.chunks, self.reused, strict=True) if reused)

    def num_loaded_tokens(self, fetched: bool) -> int:
        """Reused tokens that were loaded from the host for this request.

        fetched: count those that had been fetched from storage for it, or the others.
        """
        slices = zip(self.prompt.chunks, self.reused, self.loaded, self.prefetched, strict=True)
        return sum(
            chunk.num_kept
            for chunk, reused, loaded, prefetched in slices
            if reused and loaded and prefetched == fetched
        )

    def num_computed_tokens(self, cached: Sequence[int]) -> int:
        """Proxy chunk tokens computed for this request, plus the cached text that its fills and its probe computed.

        cached: per text span, how many tokens are cached.
        """
        num_tokens = self.prompt.num_chunk_tokens - self.num_reused_tokens
        if not self.found_text:
            return num_tokens
        spans = zip(self.prompt.spans, cached, strict=True)
        return num_tokens + sum(max(0, count - self.found_text.get(span.namespace, count)) for span, count in spans)

    @property
    def partly_reused(self) -> list[tuple[int, int]]:
        """The indices of chunks that are reused, but not all of their tokens, and how many of these are."""
        slices = zip(self.prompt.chunks, self.reused, strict=True)
        return [(c.index, c.num_kept) for c, reused in slices if reused and c.num_kept < c.num_tokens]

    @property
    def hit_mask(self) -> int:
        """The reused chunks: bit i stands for chunk i of the prompt's layout."""
        return sum(1 << chunk.index for chunk, reused in zip(self.prompt.chunks, self.reused, strict=True) if reused)


@dataclasses.dataclass(eq=False)
class Undecided:
    """A waiting request whose policy chooses by a probe that has not ended.

    kept: per chunk of the layout, what the probe keeps.
    num_chosen: for how many of the first chunks `kept` is the choice of an earlier turn.
    probe: the internal request that measures.
    launched: whether a batch has taken the probe.
    """

    layout: PromptLayout
    policy: Policy
    kept: Sequence[Ranges]
    num_chosen: int = 0
    probe: Request | None = None
    launched: bool = False


def unused_hits(req: Request) -> int:
    """Bit i is set if chunk i of the prompt's layout was cached on arrival, though the policy keeps none of its KV."""
    return getattr(req, "lazy_unused_hits", 0)


def num_pieces(req: Request) -> int:
    """The most pieces of a request that recurrent layers compute in one pass: each is a sequence of its own to them,
    text between chunks or a chunk that a fill computes."""
    state = lazy_state(req)
    if isinstance(state, Fill):
        return len(state.parts)
    return len(state.prompt.spans) if isinstance(state, LinkedRequest) else 1


def lazy_state(req: Request | None) -> LinkedRequest | Undecided | Fill | None:
    """The state that `req` carries, None if it has no part in chunk reuse."""
    return getattr(req, "lazy", None)


def as_linked(req: Request) -> LinkedRequest:
    """The state of a request known to be linked."""
    state = lazy_state(req)
    assert isinstance(state, LinkedRequest)
    return state


def linked(req: Request | None) -> LinkedRequest | None:
    """The state of a linked request, None for any other."""
    state = lazy_state(req)
    return state if isinstance(state, LinkedRequest) else None


def by_policy(reqs: Iterable[Request]) -> dict[Policy, list[Request]]:
    """The linked requests among `reqs`, grouped by policy."""
    groups: dict[Policy, list[Request]] = {}
    for req in reqs:
        if (state := linked(req)) is not None:
            groups.setdefault(state.policy, []).append(req)
    return groups


def is_internal(req: Request) -> bool:
    """Whether a request is a fill or a probe, which have no client."""
    state = lazy_state(req)
    return isinstance(state, Fill) or (isinstance(state, LinkedRequest) and state.probe is not None)


def is_ahead(req: Request) -> bool:
    """Whether a request computes chunks ahead of use only, so that nobody waits for it."""
    state = lazy_state(req)
    if isinstance(state, Fill):
        return all(is_ahead(parent) for parent in state.parents)
    return isinstance(state, LinkedRequest) and state.ahead


def stand_in(req: Request) -> Request | None:
    """The request that represents `req` in the queue: its probe if it has one (None while that runs), else itself."""
    state = lazy_state(req)
    if not isinstance(state, Undecided):
        return req
    return None if state.launched else state.probe


def fill_of(req: Request) -> Fill | None:
    """The state of a fill, None for any other request."""
    state = lazy_state(req)
    return state if isinstance(state, Fill) else None

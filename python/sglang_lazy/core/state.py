"""What requests carry through SGLang's scheduler, all of it in one attribute: `req.lazy`.

A linked request has a `LinkedRequest`; before its policy has chosen what it keeps, an `Undecided`. An internal one that
computes chunks has a `Fill`. All others have nothing.
"""

import dataclasses
import functools
from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.prompt import ChunkSlice, LinkedPrompt, Ranges
from sglang_lazy.core.rows import FillRow, Row
from sglang_lazy.core.segments import PromptLayout


@dataclasses.dataclass(eq=False)
class ChunkNodes:
    """Where a linked request's chunks are in the tree. Locked once, however many hold them: the waiting request, its
    row, or both.

    nodes: per slice, the tree node at which its needed part ends; None while that is missing.
    spreads: per slice, `ChunkSlice.spread`.
    num_locks: the number of holders.
    """

    nodes: list[Any]
    spreads: list[int]
    num_locks: int = 0

    @classmethod
    def missing(cls, slices: Sequence[ChunkSlice]) -> "ChunkNodes":
        """Of slices that are yet to be found, for one holder."""
        return cls([None] * len(slices), [chunk.spread for chunk in slices], num_locks=1)

    @property
    def found(self) -> list[tuple[Any, int]]:
        """The nodes of slices that are not missing, with their spreads."""
        return [pair for pair in zip(self.nodes, self.spreads, strict=True) if pair[0] is not None]

    @property
    def complete(self) -> bool:
        return None not in self.nodes


@dataclasses.dataclass(eq=False)
class RowNodes:
    """All tree nodes that a row depends on. SGLang locks and unlocks it as the request's `last_node`.

    spans: per text span, the node where its cached part ends; for a fill, the same per chunk.
    spreads: per span, as `Tree.lock` takes it: the pass of a fill is yet to read what it has published. None for 0.
    num_locks: SGLang's locks. The nodes are locked once while there is any.
    used: whether the use of these nodes has been counted.
    """

    chunks: ChunkNodes
    spans: list[Any]
    spreads: list[int] | None = None
    num_locks: int = 0
    used: bool = False


@dataclasses.dataclass(eq=False)
class Probe:
    """What an internal linked request measures for another one, of each token of its prompt's slices.

    parent: the request whose policy chooses by it.
    query_start: the position from which on the attention of its text counts.
    """

    parent: Any
    query_start: int
    _sums: torch.Tensor | None = None
    _on_host: torch.Tensor | None = None
    _copied: Any = None

    def add(self, scores: torch.Tensor) -> None:
        """What one forward pass measured, float32 [num_chunk_tokens of its prompt]."""
        self._sums = scores if self._sums is None else self._sums + scores

    def send(self) -> None:
        """Start copying the sums to the host, behind the pass that has completed them."""
        assert self._sums is not None
        on_gpu = self._sums.is_cuda
        # Into pageable memory the copy would wait for the device.
        on_host = torch.empty(self._sums.shape, dtype=self._sums.dtype, pin_memory=on_gpu)
        self._on_host = on_host.copy_(self._sums, non_blocking=True)
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def result(self) -> np.ndarray:
        """The sums, float32 [num_chunk_tokens of its prompt]."""
        assert self._on_host is not None
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host.numpy()


@dataclasses.dataclass(eq=False)
class LinkedRequest:
    """A request whose policy keeps KV of chunks.

    found: per slice, the tree node at which it was cached on arrival, or None. Not locked, so it may be evicted.
    asked: per slice, whether storage was asked for it on arrival.
    chunks: where its chunks are, locked while it waits; None while it holds nothing.
    row: the row's order; set when the request is matched for a batch.
    own: what its policy keeps while the request has a row.
    beside: int32, the slots of its chunks, once it has a row, if the model reads them beside the text.
    reused: per slice, whether it was cached or stored on arrival, and has not been computed for this request since.
    loaded: per slice, whether it was loaded from the host for this request.
    found_text: per namespace of text that its fills or its probe compute, how many tokens of it were cached before.
    probe: what it measures; None for a user's request.
    waits_since: by `time.perf_counter`, since when only its chunks have been missing; None before, and once it runs.
    """

    prompt: LinkedPrompt
    policy: Policy
    found: list[Any]
    asked: list[bool]
    chunks: ChunkNodes | None = None
    row: Row = dataclasses.field(init=False)
    own: Any = None
    beside: torch.Tensor | None = None
    reused: list[bool] = dataclasses.field(init=False)
    loaded: list[bool] = dataclasses.field(init=False)
    found_text: dict[Namespace | None, int] = dataclasses.field(default_factory=dict)
    probe: Probe | None = None
    waits_since: float | None = None

    def __post_init__(self):
        self.reused = [node is not None or asked for node, asked in zip(self.found, self.asked, strict=True)]
        self.loaded = [False] * len(self.found)

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
        """Whether its row is the whole prompt as plain text, which a probe compares with the chunks."""
        return self.probe is not None and self.policy.probes == "deviation"

    @property
    def needs_resident(self) -> bool:
        """Whether its forward pass must follow those that compute its chunks."""
        return self.policy.needs_resident or self.recomputes

    @property
    def num_own_slots(self) -> int:
        """How many slots it takes besides those of its text."""
        return self.prompt.num_chunk_tokens if self.recomputes else self.policy.num_own_slots(self.prompt)

    @property
    def segments(self) -> tuple[ChunkSlice, ...]:
        """The slices whose keys are stored in the row at positions relative to their chunks."""
        return self.prompt.in_row if self.policy.in_place and not self.recomputes else ()

    @property
    def read_in_place(self) -> tuple[ChunkSlice, ...]:
        """The slices that attention reads where all requests do: in the row, or beside the text."""
        return self.prompt.chunks if self.prompt.beside else self.segments

    @property
    def num_reused_tokens(self) -> int:
        """Chunk tokens that were not computed for this request."""
        return sum(chunk.num_kept for chunk, reused in zip(self.prompt.chunks, self.reused, strict=True) if reused)

    def num_loaded_tokens(self, fetched: bool) -> int:
        """Those of them that were loaded from the host for this request, and had been fetched for it from storage or
        not."""
        slices = zip(self.prompt.chunks, self.reused, self.loaded, self.asked, strict=True)
        return sum(chunk.num_kept for chunk, reused, loaded, asked in slices if reused and loaded and asked == fetched)

    def num_computed_tokens(self, cached: Sequence[int]) -> int:
        """Kept chunk tokens that were computed for this request, and of its `cached` text, per span, what its fills and
        its probe have computed."""
        num_tokens = self.prompt.num_chunk_tokens - self.num_reused_tokens
        if not self.found_text:
            return num_tokens
        spans = zip(self.prompt.spans, cached, strict=True)
        return num_tokens + sum(max(0, count - self.found_text.get(span.namespace, count)) for span, count in spans)

    @property
    def hit_mask(self) -> int:
        """Bit i is set if chunk i of the prompt's layout was reused."""
        return sum(1 << chunk.index for chunk, reused in zip(self.prompt.chunks, self.reused, strict=True) if reused)


@dataclasses.dataclass(eq=False)
class Undecided:
    """A waiting request whose policy chooses by a probe that has not ended.

    kept: per chunk of the layout, what the probe keeps.
    num_chosen: of how many chunks, the first ones, that has been chosen in earlier turns.
    probe: the internal request that measures.
    launched: whether a batch has taken it.
    """

    layout: PromptLayout
    policy: Policy
    kept: Sequence[Ranges]
    num_chosen: int = 0
    probe: Any = None
    launched: bool = False


class FillPart(NamedTuple):
    """Tokens (int64) that a fill computes, and the namespace that they are published in; the preamble is no chunk."""

    tokens: array
    namespace: Hashable
    chunk: ChunkSlice | None = None


@dataclasses.dataclass(eq=False)
class Fill:
    """An internal request that computes missing chunks one after another; none sees another.

    All are computed behind the same preamble, which it computes as well unless that is cached. It ends when the batch
    with its last tokens is formed.

    owner: the request for which it was made.
    parents: the requests that wait for it.
    row: the row's order; set when it is matched for a batch.
    duplicates: int64, its own slots for tokens that the tree holds in other slots; None until its chunks are published.
    lent: int64, those of them whose window KV the tree has taken.
    began: by `time.perf_counter`, when it was last matched for a batch.
    """

    chunks: Sequence[ChunkSlice]
    owner: Any
    parents: list[Any] = dataclasses.field(default_factory=list)
    row: FillRow = dataclasses.field(init=False)
    duplicates: torch.Tensor | None = None
    lent: torch.Tensor = dataclasses.field(init=False)
    began: float = dataclasses.field(init=False)

    @property
    def preamble(self) -> array:
        """What all its chunks are computed behind, int64."""
        return self.chunks[0].preamble

    @functools.cached_property
    def parts(self) -> list[FillPart]:
        """What it computes, in this order: its preamble, if there is one, and its chunks."""
        preamble = [FillPart(self.preamble, self.chunks[0].key.namespace.extra_key)] if self.preamble else []
        return [*preamble, *(FillPart(chunk.tokens, chunk.key.namespace, chunk) for chunk in self.chunks)]


def lazy_state(req: Any) -> LinkedRequest | Undecided | Fill | None:
    """What `req` carries."""
    return getattr(req, "lazy", None)


def as_linked(req: Any) -> LinkedRequest:
    """The state of a request that is known to be linked."""
    state = lazy_state(req)
    assert isinstance(state, LinkedRequest)
    return state


def linked(req: Any) -> LinkedRequest | None:
    """The state of a linked request, None for any other."""
    state = lazy_state(req)
    return state if isinstance(state, LinkedRequest) else None


def is_internal(req: Any) -> bool:
    """Whether a request is a fill or a probe, which answer nobody."""
    state = lazy_state(req)
    return isinstance(state, Fill) or (isinstance(state, LinkedRequest) and state.probe is not None)


def stand_in(req: Any) -> Any | None:
    """What stands in the queue for a waiting request: its probe where it has one, nobody while that runs."""
    state = lazy_state(req)
    if not isinstance(state, Undecided):
        return req
    return None if state.launched else state.probe


def fill_of(req: Any) -> Fill | None:
    """The state of a fill, None for any other request."""
    state = lazy_state(req)
    return state if isinstance(state, Fill) else None

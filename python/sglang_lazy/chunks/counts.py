"""What happens to chunks, in numbers that are always counted: an addition where something happens, and no more."""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.chunks.tree import Node
from sglang_lazy.core.refusal import REASONS

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
HITS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The bounds of histograms."""
PIECE = 2000
"""Chunks that are counted together, which takes one or two milliseconds."""
MODES = ("prefill", "decode")


class Histogram:
    """How many values were observed up to each of the ascending `bounds`, but above the one before it; the last count
    is of those above all. total: of the values."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Counts:
    """Since the start, flushes notwithstanding.

    num_references: chunks in prompts that began to run, those of a retracted one again.
    num_hits: of these, how many were cached when the prompt arrived.
    num_reused_tokens: tokens of chunks that prompts kept of these.
    num_filled_tokens: what fills have computed, preambles among it.
    num_evicted_chunks, num_evicted_tokens: of chunks, from the device.
    refused: by reason.
    batches: forward passes, by mode and whether chunks were computed or attended to.
    fill_seconds: from when a fill's first batch was formed until its result was there.
    wait_seconds: from when a prompt might have run, but for its chunks, until a batch took it; of prompts that missed
        some, and of probes in their stead.
    hits_per_chunk: hits of each chunk that has left the cache, host tier included.
    """

    def __init__(self) -> None:
        self.num_references = self.num_hits = self.num_reused_tokens = self.num_filled_tokens = 0
        self.num_evicted_chunks = self.num_evicted_tokens = 0
        self.refused = dict.fromkeys(REASONS, 0)
        self.batches = dict.fromkeys(itertools.product(MODES, (False, True)), 0)
        self.fill_seconds, self.wait_seconds = Histogram(SECONDS), Histogram(SECONDS)
        self.hits_per_chunk = Histogram(HITS)


class Share(NamedTuple):
    """What several chunks begin with counts as tokens of each."""

    chunks: int
    tokens: int


class Occupancy(NamedTuple):
    """The cached chunks now.

    resident: on the device.  pinned, locked: of these, kept by pins, and held by requests or by copies under way.
    evictable: of these, neither.  host: only in the host's memory.
    """

    resident: Share
    pinned: Share
    locked: Share
    evictable: Share
    host: Share

    @classmethod
    def of(cls, chunks: Iterable[CachedChunk]) -> "Occupancy":
        """Looks at every chunk, which takes half a millisecond for a thousand."""
        counts, tokens = [0] * 5, [0] * 5
        for chunk in chunks:
            node: Node = chunk.node
            if node.evicted:
                kind = 4
            elif not node.lock_ref:
                kind = 3
            else:
                kind = 0 if chunk.pin is None else 1 if node.lock_ref == 1 else 2
            counts[kind] += 1
            tokens[kind] += chunk.num_tokens
        locked, pinned, both, evictable, host = map(Share, counts, tokens)
        return cls(
            resident=_sum(locked, pinned, both, evictable),
            pinned=_sum(pinned, both),
            locked=_sum(locked, both),
            evictable=evictable,
            host=host,
        )

    # Share by share, where tuples in general are joined.
    def __add__(self, other: "Occupancy") -> "Occupancy":  # type: ignore[override]
        return Occupancy(*map(_sum, self, other))


class Census:
    """Counts all chunks of a `ChunkStore`, some at a time, over and over."""

    def __init__(self, store: Any):
        self._store, self._start, self._found = store, 0, Occupancy.of(())

    def step(self) -> Occupancy | None:
        """Count some more. All of them once they have been counted, None before; then it begins anew."""
        chunks, following = self._store.catalog.piece(None, True, self._start, PIECE)
        found, self._start = self._found + Occupancy.of(chunks), following or 0
        self._found = found if following else Occupancy.of(())
        return None if following else found


def _sum(*shares: Share) -> Share:
    return Share(*map(sum, zip(*shares, strict=True)))

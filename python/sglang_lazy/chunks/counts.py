"""Counters of what happens to chunks. They are always on; an event costs one addition."""

import itertools
import time
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.core.periods import SumsByTenant
from sglang_lazy.core.refusal import REASONS

if TYPE_CHECKING:
    from sglang_lazy.chunks.store import ChunkStore

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
HITS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""The upper bounds of histogram buckets."""
AT_ONCE = 2000
"""How many chunks `Census` counts in one step, which takes one or two milliseconds."""
MODES = ("prefill", "decode")


class Histogram:
    """Observed values by bucket: `counts[i]` of them are at most `bounds[i]` and above the bound before it; the last
    count is for values above all bounds.  total: the sum of the values."""

    def __init__(self, bounds: Sequence[float]):
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Counts:
    """Totals since the start; flushing the cache does not reset them.

    num_references: chunks in prompts that began to run, counted again after a retraction.
    num_hits: how many of them were cached when the prompt arrived.
    num_reused_tokens: the kept tokens of the hits.
    num_filled_tokens: tokens that fills computed, including preambles.
    num_evicted_chunks, num_evicted_tokens: chunks and their tokens evicted from the device.
    evicted_lately: the same over the last hour, by tenant.
    refused: refusals by reason.
    batches: forward passes, by mode and whether chunks were computed or attended to.
    fill_seconds: from forming a fill's first batch until its result is there.
    wait_seconds: how long a prompt, or its probe, waited for missing chunks only, until a batch took it.
    hits_per_chunk: hits of each chunk that has left the cache, including the host tier.
    """

    def __init__(self) -> None:
        self.num_references = self.num_hits = self.num_reused_tokens = self.num_filled_tokens = 0
        self.num_evicted_chunks = self.num_evicted_tokens = 0
        self.evicted_lately = SumsByTenant()
        self.refused = dict.fromkeys(REASONS, 0)
        self.batches = dict.fromkeys(itertools.product(MODES, (False, True)), 0)
        self.fill_seconds, self.wait_seconds = Histogram(SECONDS), Histogram(SECONDS)
        self.hits_per_chunk = Histogram(HITS)

    def evicted(self, tenant: Hashable, num_chunks: int, num_tokens: int) -> None:
        """KV of a tenant's chunks has left the device."""
        self.num_evicted_chunks += num_chunks
        self.num_evicted_tokens += num_tokens
        self.evicted_lately.add(tenant, (num_chunks, num_tokens), time.time())


class Share(NamedTuple):
    """A number of chunks and of their tokens. A beginning that several chunks share counts for each."""

    chunks: int
    tokens: int


_STATES = _LOCKED, _PINNED, _LOCKED_AND_PINNED, _EVICTABLE, _HOST = range(5)


class Occupancy(NamedTuple):
    """The cached chunks now.

    resident: on the device; of these, pinned: held by pins; locked: held by requests or by copies in progress;
    evictable: held by neither.  host: only in host memory.
    """

    resident: Share
    pinned: Share
    locked: Share
    evictable: Share
    host: Share

    @classmethod
    def of(cls, chunks: Iterable[CachedChunk]) -> "Occupancy":
        """Count `chunks`, which takes half a millisecond for a thousand."""
        counts, tokens = [0] * len(_STATES), [0] * len(_STATES)
        for chunk in chunks:
            node = chunk.node
            assert node is not None
            if node.slots is None:
                state = _HOST
            elif not node.locks:
                state = _EVICTABLE
            elif chunk.pin is None:
                state = _LOCKED
            else:
                state = _PINNED if node.locks == 1 else _LOCKED_AND_PINNED
            counts[state] += 1
            tokens[state] += chunk.num_tokens
        locked, pinned, both, evictable, host = map(Share, counts, tokens)
        return cls(
            resident=_sum(locked, pinned, both, evictable),
            pinned=_sum(pinned, both),
            locked=_sum(locked, both),
            evictable=evictable,
            host=host,
        )

    # Adds field by field; a tuple's own `+` would concatenate.
    def __add__(self, other: "Occupancy") -> "Occupancy":  # type: ignore[override]
        return Occupancy(*map(_sum, self, other))


class Census:
    """Counts all chunks of a `ChunkStore` repeatedly, a batch at a time."""

    def __init__(self, store: "ChunkStore"):
        self._store, self._start, self._found = store, 0, Occupancy.of(())

    def step(self) -> Occupancy | None:
        """Count the next batch. Returns the totals after the last one, then starts over; None before that."""
        chunks, following = self._store.catalog.scan(None, True, self._start, AT_ONCE)
        found, self._start = self._found + Occupancy.of(chunks), following or 0
        self._found = found if following else Occupancy.of(())
        return None if following else found


def _sum(*shares: Share) -> Share:
    return Share(*map(sum, zip(*shares, strict=True)))

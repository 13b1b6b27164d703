"""A survey of the cached chunks: sums and the first few of each kind, gathered in steps between batches."""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from operator import attrgetter
from typing import Any

from sglang_lazy.chunks.catalog import CachedChunk, tenant_of
from sglang_lazy.chunks.counts import Occupancy
from sglang_lazy.chunks.reports import state_of, under_way

STEP = 400
"""Chunks in a step, which takes about half a millisecond."""
TOP = 10
"""Chunks in a list."""
_SORTED_BY = {"hottest": "hits", "largest": "num_tokens", "pinned": "num_tokens"}
"""The lists, and the field of `CachedChunk` whose largest values they have; 0 is none."""


class Survey:
    """Of the chunks that a tenant, or everybody, has when it begins, but for those that leave the cache meanwhile.

    store: the `ChunkStore`.
    """

    def __init__(self, store: Any, tenant: Hashable, everybody: bool):
        self._store, self._tenant, self._everybody = store, tenant, everybody
        self._rest: Iterator[CachedChunk] = iter(store.catalog.of(tenant, everybody))
        self._occupancy = Occupancy.of(())
        self._lists: dict[str, list[CachedChunk]] = {name: [] for name in _SORTED_BY}

    def step(self) -> bool:
        """Look at the next `STEP` chunks; whether these were the last."""
        looked_at = list(itertools.islice(self._rest, STEP))
        chunks = [chunk for chunk in looked_at if chunk.node is not None]
        self._occupancy += Occupancy.of(chunks)
        for name, field in _SORTED_BY.items():
            more = [chunk for chunk in chunks if chunk.pin is not None] if name == "pinned" else chunks
            self._lists[name] = heapq.nlargest(TOP, self._lists[name] + more, key=attrgetter(field))
        return len(looked_at) < STEP

    def result(self, describe: Callable[[CachedChunk], dict[str, Any]]) -> dict[str, Any]:
        """What was found.

            {"chunks": {"resident": {"chunks": 2, "tokens": 150}, …, "pending": 1, "fetching": 0},
             "hottest": […], "largest": […], "pinned": […]}

        chunks: shares by the names in `Occupancy`; how many chunks are being computed, and fetched from storage.
        hottest, largest, pinned: at most `TOP` chunks each, as `describe` gives them.
        """
        coming = [
            state_of(self._store, chunk)
            for chunk in under_way(self._store)
            if self._everybody or tenant_of(chunk.key.namespace) == self._tenant
        ]
        shares = {name: share._asdict() for name, share in self._occupancy._asdict().items()}
        lists = {
            name: [describe(chunk) for chunk in chunks if chunk.node is not None and getattr(chunk, _SORTED_BY[name])]
            for name, chunks in self._lists.items()
        }
        return {"chunks": {**shares, **{state: coming.count(state) for state in ("pending", "fetching")}}, **lists}

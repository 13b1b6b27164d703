"""Picks the worker that has a prompt's chunks, from an index of what was sent where, corrected by the answers.

Workers need not be queried. A chunk that was sent to a worker is assumed to be there until an answer reports a miss.
Caches evict the least recently used first, so everything last used before a missed chunk is assumed gone as well: the
index shrinks to what a worker's cache holds, whatever its size, and empties when a worker restarts.

If a worker publishes KV events (`follow`), the index also has chunks that others sent there.
"""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

IMBALANCE, SLACK = 1.25, 2
CAPACITY = 1 << 16


@dataclasses.dataclass(slots=True)
class _Use:
    """The use of a chunk at one worker; times are counts of picks.

    sent: when it was last sent.  answered: when the last answered prompt with it was sent, None before the first.
    """

    sent: int
    answered: int | None = None


@dataclasses.dataclass(slots=True)
class _Cache:
    """What is known of a worker's cache.

    sent: the chunks sent to it, the most recent last.
    stored: by place (rank and medium), the chunks reported to be there, the most recent last.
    """

    sent: OrderedDict[Hashable, _Use] = dataclasses.field(default_factory=OrderedDict)
    stored: defaultdict[Hashable, OrderedDict[Hashable, None]] = dataclasses.field(
        default_factory=lambda: defaultdict(OrderedDict)
    )

    def is_stored(self, chunk: Hashable) -> bool:
        return any(chunk in stored for stored in self.stored.values())

    def has(self, chunk: Hashable) -> bool:
        return chunk in self.sent or self.is_stored(chunk)


class Picker:
    """Picks the worker that has most of a prompt's chunks, among those whose load allows it. Not thread-safe.

    imbalance: the most requests in flight at one worker, including the new one, as a multiple of the mean (consistent
        hashing with bounded loads, arXiv 1608.01350), plus `SLACK`, since a few requests are no load; at least 1.
    capacity: how many chunks to remember per worker and per place, the most recent ones.

    Raises ValueError for values below 1.
    """

    def __init__(self, imbalance: float = IMBALANCE, capacity: int = CAPACITY):
        if not (imbalance >= 1 and capacity >= 1):
            raise ValueError(f"imbalance and capacity must be at least 1, got {imbalance} and {capacity}")
        self.imbalance, self.capacity = imbalance, capacity
        self._caches: defaultdict[Hashable, _Cache] = defaultdict(_Cache)
        self._now = 0

    def pick(self, chunks: Mapping[Any, int], loads: Mapping[Any, int]) -> "Pick":
        """The worker for a prompt, which is assumed to have its chunks from now on. Raises LookupError without workers.

        chunks: the size of each distinct chunk, in any unit, by name.
        loads: the number of requests in flight at each worker that may be picked.
        """
        if not loads:
            raise LookupError("there is no worker to pick")
        limit = self.imbalance * (sum(loads.values()) + 1) / len(loads) + SLACK

        def rank(worker: Hashable) -> tuple[int, int, int]:
            cache = self._caches[worker]
            present = sum(size for chunk, size in chunks.items() if cache.has(chunk))
            return present, -loads[worker], -len(cache.sent)

        worker = max((worker for worker, load in loads.items() if load + 1 <= limit), key=rank)
        return Pick(worker, self._send(chunks, worker), self)

    def _send(self, chunks: Mapping[Hashable, int], worker: Hashable) -> dict[Hashable, int | None]:
        """Record that `chunks` are sent to `worker`; returns the previous `answered` of each."""
        self._now += 1
        sent, before = self._caches[worker].sent, {}
        for chunk in chunks:
            use = sent.setdefault(chunk, _Use(self._now))
            use.sent = self._now
            before[chunk] = use.answered
            sent.move_to_end(chunk)
        self._limit(sent)
        return before

    def _limit(self, known: OrderedDict[Hashable, Any]) -> None:
        while len(known) > self.capacity:
            known.popitem(last=False)

    def stored(self, worker: Hashable, place: Hashable, chunk: Hashable) -> None:
        """Record that a worker reports a chunk as stored.  place: which of its caches."""
        stored = self._caches[worker].stored[place]
        stored[chunk] = None
        self._limit(stored)

    def removed(self, worker: Hashable, place: Hashable, chunks: Iterable[Hashable]) -> None:
        """Record that a worker reports chunks as removed from a place. Unknown names are ignored."""
        cache = self._caches[worker]
        for chunk in chunks:
            cache.stored[place].pop(chunk, None)
            if chunk in cache.sent and not cache.is_stored(chunk):
                del cache.sent[chunk]

    def forget(self, worker: Hashable) -> None:
        """Forget a worker, whose cache is empty or which is gone."""
        self._caches.pop(worker, None)

    def _learn(self, pick: "Pick", hits: Mapping[Hashable, bool]) -> None:
        sent = self._caches[pick.worker].sent
        for chunk in pick._before.keys() & sent.keys():
            sent[chunk].answered = sent[chunk].sent
        missed = [before for chunk, before in pick._before.items() if before and not hits.get(chunk, True)]
        gone = max(missed, default=0)
        while sent and next(iter(sent.values())).sent < gone:
            sent.popitem(last=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Pick:
    """A prompt that goes to `worker`."""

    worker: Hashable
    _before: Mapping[Hashable, int | None]
    _picker: Picker

    def answered(self, hits: Mapping[Any, bool]) -> None:
        """Learn from the worker's answer.  hits: whether each chunk was cached, as far as the answer says."""
        self._picker._learn(self, hits)


async def learning(
    outputs: AsyncGenerator[dict, None], pick: Pick, names: Sequence[Hashable]
) -> AsyncGenerator[dict, None]:
    """`outputs` of a request, learning from its chunk report which chunks its worker had.  names: of the chunks."""
    async with aclosing(outputs):
        async for out in outputs:
            if (report := out["meta_info"].get("chunks")) is not None:
                pick.answered({name: chunk["hit"] for name, chunk in zip(names, report, strict=True)})
            yield out

"""Which worker has a prompt's chunks: an index of what was sent where, corrected by what answers say.

Nothing is asked of the workers. A chunk that was sent to one is there, until an answer says that it was not. Caches
evict what was used longest ago, so whatever was last used before such a chunk is taken for gone with it: the index
shrinks to what a worker's cache holds, of whatever size that is, and empties when one starts anew.

Where a worker publishes what it stores and removes (`follow`), that is known of it, whoever asked for it.
"""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

IMBALANCE, SLACK = 1.25, 2
CAPACITY = 1 << 16


@dataclasses.dataclass(slots=True)
class _Use:
    """When a chunk was last sent to a worker, and when an answered prompt with it was; None before the first answer,
    until which nobody knows whether it is there. Times are counts of picks."""

    sent: int
    answered: int | None = None


@dataclasses.dataclass(slots=True)
class _Cache:
    """What is known of a worker's cache.

    sent: the chunks that were sent to it, the last one last.
    stored: by place, what it has said to be there, the last one last.
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
    """Picks the worker that has most of a prompt's chunks, of those whose load allows it.

    imbalance: with the new request, none may have more than so many times the mean of the requests in flight (as in
        consistent hashing with bounded loads, arXiv 1608.01350), and `SLACK` more, since a few are no load; at least 1.
    capacity: the chunks remembered of each worker, those sent to it last; and of each of its places, those stored there
        last.

    Raises ValueError for values below 1. Not for several threads at once.
    """

    def __init__(self, imbalance: float = IMBALANCE, capacity: int = CAPACITY):
        if not (imbalance >= 1 and capacity >= 1):
            raise ValueError(f"imbalance and capacity must be at least 1, got {imbalance} and {capacity}")
        self.imbalance, self.capacity = imbalance, capacity
        self._caches: defaultdict[Hashable, _Cache] = defaultdict(_Cache)
        self._now = 0

    def pick(self, chunks: Mapping[Any, int], loads: Mapping[Any, int]) -> "Pick":
        """The worker for a prompt. Its chunks count as there from now on. Raises LookupError if there are no workers.

        chunks: the size of each different chunk, in any unit, by what tells its KV from that of others.
        loads: the requests in flight at each worker that may be picked.
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
        """Note that these are sent there; when each was answered for before."""
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
        """The worker says that it has a chunk.  place: which of its caches, of several."""
        stored = self._caches[worker].stored[place]
        stored[chunk] = None
        self._limit(stored)

    def removed(self, worker: Hashable, place: Hashable, chunks: Iterable[Hashable]) -> None:
        """The worker says that a place has these no longer. Some may be nothing that prompts ask for."""
        cache = self._caches[worker]
        for chunk in chunks:
            cache.stored[place].pop(chunk, None)
            if chunk in cache.sent and not cache.is_stored(chunk):
                del cache.sent[chunk]

    def forget(self, worker: Hashable) -> None:
        """This worker's cache is empty, or nobody will ask for it again."""
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
        """The worker has answered.  hits: whether each of its chunks was cached, as far as the answer says."""
        self._picker._learn(self, hits)

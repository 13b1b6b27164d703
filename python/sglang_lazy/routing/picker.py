"""Which worker has a prompt's chunks: an index of what was sent where, corrected by what answers say.

Nothing is asked of the workers. A chunk that was sent to one is there, until an answer says that it was not. Caches
evict what was used longest ago, so whatever was last used before such a chunk is taken for gone with it: the index
shrinks to what a worker's cache holds, of whatever size that is, and empties when one starts anew.
"""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

IMBALANCE, SLACK = 1.25, 2
CAPACITY = 1 << 16


@dataclasses.dataclass(slots=True)
class _Use:
    """When a chunk was last sent to a worker, and when an answered prompt with it was; None before the first answer,
    until which nobody knows whether it is there. Times are counts of picks."""

    sent: int
    answered: int | None = None


class Picker:
    """Picks the worker that has most of a prompt's chunks, of those whose load allows it.

    imbalance: with the new request, none may have more than so many times the mean of the requests in flight (as in
        consistent hashing with bounded loads, arXiv 1608.01350), and `SLACK` more, since a few are no load; at least 1.
    capacity: the chunks remembered of each worker, those sent to it last.

    Raises ValueError for values below 1. Not for several threads at once.
    """

    def __init__(self, imbalance: float = IMBALANCE, capacity: int = CAPACITY):
        if not (imbalance >= 1 and capacity >= 1):
            raise ValueError(f"imbalance and capacity must be at least 1, got {imbalance} and {capacity}")
        self.imbalance, self.capacity = imbalance, capacity
        self._sent: defaultdict[Hashable, OrderedDict[Hashable, _Use]] = defaultdict(OrderedDict)  # oldest first
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
            sent = self._sent[worker]
            present = sum(size for chunk, size in chunks.items() if chunk in sent)
            return present, -loads[worker], -len(sent)

        worker = max((worker for worker, load in loads.items() if load + 1 <= limit), key=rank)
        return Pick(worker, self._send(chunks, worker), self)

    def _send(self, chunks: Mapping[Hashable, int], worker: Hashable) -> dict[Hashable, int | None]:
        """Note that these are sent there; when each was answered for before."""
        self._now += 1
        sent, before = self._sent[worker], {}
        for chunk in chunks:
            use = sent.setdefault(chunk, _Use(self._now))
            use.sent = self._now
            before[chunk] = use.answered
            sent.move_to_end(chunk)
        while len(sent) > self.capacity:
            sent.popitem(last=False)
        return before

    def forget(self, worker: Hashable) -> None:
        """This worker's cache is empty, or nobody will ask for it again."""
        self._sent.pop(worker, None)

    def _learn(self, pick: "Pick", hits: Mapping[Hashable, bool]) -> None:
        sent = self._sent[pick.worker]
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

"""Which worker has a prompt's chunks: an index of what was sent where, corrected by what answers say.

Nothing is asked of the workers. A chunk that was sent to one is there, until an answer says that it was not. Caches evict
what was used longest ago, so with that chunk all that was used before it is taken for gone.
"""

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

Worker = TypeVar("Worker", bound=Hashable)

IMBALANCE = 1.25
CAPACITY = 100_000


@dataclasses.dataclass(slots=True)
class _Use:
    """picked: when the chunk was last sent to the worker.
    served: when one that has been answered was sent; None before the first answer, until which it may be missing.
    """

    picked: int
    served: int | None = None


@dataclasses.dataclass(slots=True)
class _Load:
    """What is known of a worker.

    in_flight: picks that have not ended.  chunks: least recently sent first.
    """

    in_flight: int = 0
    chunks: OrderedDict[Hashable, _Use] = dataclasses.field(default_factory=OrderedDict)


class Picker(Generic[Worker]):
    """Picks the worker that has most of a prompt's chunks, of those whose load allows it.

    imbalance: no worker is picked for more than so many times the mean number of requests in flight, rounded up (as in
        consistent hashing with bounded loads, arXiv 1608.01350); at least 1.
    capacity: chunks that are remembered of each worker.

    Not for several threads at once.
    """

    def __init__(self, imbalance: float = IMBALANCE, capacity: int = CAPACITY):
        if not imbalance >= 1 or capacity < 1:
            raise ValueError(f"imbalance and capacity must be at least 1, got {imbalance} and {capacity}")
        self.imbalance, self.capacity = imbalance, capacity
        self._workers: dict[Worker, _Load] = {}
        self._now = 0

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers)

    def add(self, worker: Worker) -> None:
        """A worker that may be picked from now on. One that is known already keeps what is known of it."""
        self._workers.setdefault(worker, _Load())

    def remove(self, worker: Worker) -> None:
        """A worker that may no longer be picked; what is known of it is forgotten."""
        self._workers.pop(worker, None)

    def pick(self, chunks: Mapping[Hashable, int]) -> "Pick[Worker]":
        """The worker for a prompt, which counts as in flight there until the pick ends. Raises LookupError without any.

        chunks: the size of each different chunk, in any unit, by what tells its KV from that of others.
        """
        if not self._workers:
            raise LookupError("there is no worker to pick")
        in_flight = sum(load.in_flight for load in self._workers.values())
        limit = math.ceil(self.imbalance * (in_flight + 1) / len(self._workers))

        def rank(load: _Load) -> tuple[int, int, int]:
            present = sum(size for chunk, size in chunks.items() if chunk in load.chunks)
            return present, -load.in_flight, -len(load.chunks)

        candidates = ((worker, load) for worker, load in self._workers.items() if load.in_flight < limit)
        worker, load = max(candidates, key=lambda candidate: rank(candidate[1]))
        return self._begin(worker, load, chunks)

    def _begin(self, worker: Worker, load: _Load, chunks: Mapping[Hashable, int]) -> "Pick[Worker]":
        self._now += 1
        load.in_flight += 1
        expected = {}
        for chunk in chunks:
            use = load.chunks.setdefault(chunk, _Use(self._now))
            expected[chunk] = use.served
            use.picked = self._now
            load.chunks.move_to_end(chunk)
        while len(load.chunks) > self.capacity:
            load.chunks.popitem(last=False)
        return Pick(self, worker, load, self._now, expected)


@dataclasses.dataclass(slots=True)
class Pick(Generic[Worker]):
    """A prompt on its way to `worker`."""

    picker: Picker[Worker]
    worker: Worker
    _load: _Load
    _time: int
    _expected: dict[Hashable, int | None]
    _ended: bool = False

    def end(self, hits: Mapping[Hashable, bool] | None = None, *, served: bool = True) -> None:
        """The prompt has left its worker, for the first time.

        hits: whether each of its chunks was cached there, as far as the answer says.
        served: whether it was answered; if not, its chunks may not have been computed.
        """
        if self._ended:
            return
        self._ended = True
        self._load.in_flight -= 1
        chunks = self._load.chunks
        for chunk, before in self._expected.items():
            use = chunks.get(chunk)
            if use is None:
                continue
            if served:
                use.served = self._time
            elif use.served is None and use.picked == self._time:
                del chunks[chunk]
            if before is not None and not (hits or {}).get(chunk, True):
                self._forget_before(before)

    def _forget_before(self, time: int) -> None:
        chunks = self._load.chunks
        while chunks and (oldest := next(iter(chunks)), chunks[oldest].picked < time)[1]:
            del chunks[oldest]

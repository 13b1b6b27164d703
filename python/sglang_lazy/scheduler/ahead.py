"""Requests that compute chunks ahead of use give way to those that somebody waits for."""

from collections.abc import Callable, Iterator

from sglang_lazy.core.request import Request
from sglang_lazy.core.state import is_ahead

PATIENCE = 8
"""In one of so many passes a chunk is computed ahead of use although somebody waits: a busy server never would else."""


class Ahead:
    """Puts the requests of a queue that compute chunks ahead of use behind all others.

    waiting: whether the queue may have any; set by whoever adds one.
    """

    def __init__(self) -> None:
        self.waiting = False
        self._num_passes = 0  # with somebody else to serve

    def behind(self, queue: list[Request], serving: Callable[[], bool]) -> Iterator[Request]:
        """The requests of `queue`, which is sorted in place, that the next batch may take.

        serving: whether anybody else is served; called when all others of the queue have been taken.

        Counts passes rather than time, so that every tensor-parallel rank decides alike.
        """
        queue.sort(key=is_ahead)
        first = next((place for place, req in enumerate(queue) if is_ahead(req)), len(queue))
        self.waiting = first < len(queue)
        yield from queue[:first]
        yield from queue[first:][: self._share(serving())]

    def _share(self, serving: bool) -> int | None:
        """How many of them the next batch may take, None for all."""
        self._num_passes = (self._num_passes + 1) % PATIENCE if serving else 0
        return (0 if self._num_passes else 1) if serving else None

"""Threads whose results are taken in the order of the requests for them."""

import collections
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

NUM_THREADS = 8


class Ended(NamedTuple):
    """A request, whether all its calls succeeded, and the seconds from the start of the first call to the last end."""

    what: Any
    succeeded: bool
    seconds: float


class InOrder:
    """A thread pool whose results are taken in the order of requests."""

    def __init__(self) -> None:
        self._asked: collections.deque[tuple[Any, list[Future]]] = collections.deque()
        self._calls: queue.SimpleQueue[tuple[Callable[[], bool], Future] | None] = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._work, daemon=True).start()

    def ask(self, what: Any, calls: Iterable[Callable[[], bool]]) -> None:
        """Request all `calls`; `what` succeeds if they all return True. A call that raises is logged and fails."""
        futures: list[Future] = []
        for call in calls:
            futures.append(Future())
            self._calls.put((call, futures[-1]))
        self._asked.append((what, futures))

    def __len__(self) -> int:
        """The number of requests whose results have not been taken."""
        return len(self._asked)

    def num_ended(self) -> int:
        """The number of results that can be taken."""
        ended = itertools.takewhile(lambda each: all(future.done() for future in each[1]), self._asked)
        return sum(1 for _ in ended)

    def take(self) -> Ended:
        """Take the result of the oldest request, which has ended."""
        what, futures = self._asked.popleft()
        if any(future.cancelled() for future in futures):
            return Ended(what, False, 0.0)
        succeeded, begun, ended = zip(*(future.result() for future in futures), strict=True)
        return Ended(what, all(succeeded), max(ended) - min(begun))

    def settle(self, patience: float) -> bool:
        """Wait until all calls have ended. Returns False if none ends for `patience` seconds.

        After one that failed, those that have not begun are cancelled: a backend that is down may take seconds to fail
        each of them.
        """
        pending = collections.deque(future for _, futures in self._asked for future in futures)
        while pending:
            if pending[0].done():
                if not _succeeded(pending.popleft()):
                    pending = collections.deque(each for each in pending if not (each.cancel() or each.done()))
                continue
            # Only those that may be running; watching all would take too long.
            first = [future for future in itertools.islice(pending, 2 * NUM_THREADS) if not future.done()]
            if first and not wait(first, patience, FIRST_COMPLETED).done:
                return False
        return True

    def stop(self) -> None:
        """End the threads after all requested calls."""
        for _ in range(NUM_THREADS):
            self._calls.put(None)

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            self._answer(*asked)

    def _answer(self, call: Callable[[], bool], future: Future) -> None:
        if not future.set_running_or_notify_cancel():
            return
        begun = time.perf_counter()
        try:
            succeeded = call()
        except Exception:  # the server must survive any error of the backend
            logger.exception("sglang-lazy: the storage backend failed")
            succeeded = False
        future.set_result((succeeded, begun, time.perf_counter()))


def _succeeded(future: Future) -> bool:
    return not future.cancelled() and future.result()[0]

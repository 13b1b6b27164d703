"""Threads that make calls to a storage backend. A call that never returns costs its request, and no other."""

import collections
import dataclasses
import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

MAX_STUCK = 8
"""How many hanging threads may be replaced. Each keeps its memory until its call returns."""


class Outcome(enum.IntEnum):
    """What has become of a request on one rank. Of several ranks' outcomes, the least is that of all together."""

    PENDING = 0
    FAILED = 1
    SUCCEEDED = 2


class Ended(NamedTuple):
    """A request, whether all its calls succeeded, and the seconds from the start of the first call to the last end."""

    what: Any
    succeeded: bool
    seconds: float


@dataclasses.dataclass(eq=False)
class _Request:
    """abandoned: nobody waits for it.  dropped: nobody takes its result."""

    what: Any
    num_left: int
    succeeded: bool = True
    abandoned: bool = False
    dropped: bool = False
    begun: float = math.inf
    ended: float = 0.0

    @property
    def outcome(self) -> Outcome:
        if self.num_left:
            return Outcome.PENDING
        return Outcome.SUCCEEDED if self.succeeded else Outcome.FAILED


class Calls:
    """A thread pool. Calls begin in the order of requests; results can be taken in any order."""

    def __init__(self, num_threads: int) -> None:
        self._lock = threading.Lock()
        self._work_came, self._call_ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._queue: collections.deque[tuple[Callable[[], bool], _Request]] = collections.deque()
        self._requests: list[_Request] = []  # whose results have not been taken, in their order
        self._running: dict[int, tuple[_Request, float]] = {}  # by thread: a call's request and begin
        self._num_threads, self._num_stuck, self._stopped = num_threads, 0, False
        self._num_ended = 0
        for _ in range(num_threads):
            self._start_thread()

    def ask(self, what: Any, calls: Iterable[Callable[[], bool]]) -> None:
        """Request all `calls`; `what` succeeds if they all return True. A call that raises is logged and fails. After
        one that failed, the request's others are not made."""
        calls = list(calls)
        asked = _Request(what, len(calls))
        with self._lock:
            self._requests.append(asked)
            self._queue += [(call, asked) for call in calls]
            self._work_came.notify(len(calls))

    def __len__(self) -> int:
        """The number of requests whose results have not been taken."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """The number of calls that threads are making, without those of threads that have been replaced."""
        return len(self._running)

    @property
    def num_ended(self) -> int:
        """The number of results that can be taken."""
        return self._num_ended

    def outcomes(self) -> list[int]:
        """Of the requests whose results have not been taken, in the order in which they were made."""
        return [asked.outcome for asked in self._requests]

    def take(self, outcomes: Sequence[int]) -> list[Ended]:
        """Take the results of the requests that are not pending according to `outcomes`, which is like `outcomes()`."""
        taken = [each for each in zip(self._requests, outcomes, strict=True) if each[1] != Outcome.PENDING]
        with self._lock:
            self._requests = [
                each for each, outcome in zip(self._requests, outcomes, strict=True) if outcome == Outcome.PENDING
            ]
            self._num_ended -= len(taken)
        return [
            Ended(asked.what, outcome == Outcome.SUCCEEDED, max(0.0, asked.ended - asked.begun))
            for asked, outcome in taken
        ]

    def cancel(self) -> None:
        """Make no call that has not begun: its request fails."""
        with self._lock:
            self._cancel(lambda _request: True)

    def abandon(self, whats: Sequence[Any]) -> None:
        """Make no more calls of these requests, and replace the threads that are making one: nobody waits for them."""
        with self._lock:
            for asked in self._requests:
                if asked.what in whats:
                    asked.abandoned = True
            self._cancel(lambda asked: asked.abandoned)
            self._replace([thread for thread, (asked, _) in self._running.items() if asked.abandoned])

    @property
    def can_run(self) -> bool:
        """Whether a thread is left that makes no call of an abandoned request."""
        with self._lock:
            return sum(asked.abandoned for asked, _ in self._running.values()) < self._num_threads

    def relieve(self, limit: float) -> None:
        """Replace the threads whose calls have been running for `limit` seconds."""
        latest = time.monotonic() - limit
        with self._lock:
            self._replace([thread for thread, (_, begun) in self._running.items() if begun < latest])

    def drop(self) -> list[Any]:
        """Forget all requests; returns what they were for. Threads that are making calls are replaced."""
        with self._lock:
            dropped = [asked.what for asked in self._requests]
            for asked in self._requests:
                asked.dropped = True
            self._requests, self._num_ended, self._num_stuck = [], 0, 0
            self._queue.clear()
            for _ in range(len(self._running)):
                self._start_thread()
            self._running.clear()
        return dropped

    def settle(self, patience: float) -> bool:
        """Wait until all calls have ended. Returns False once those that have not have all run for `patience` seconds.

        After one that failed, those that have not begun are not made: a backend that is down may take seconds to fail
        each of them.
        """
        with self._lock:
            while True:
                if not all(asked.succeeded for asked in self._requests):
                    self._cancel(lambda _request: True)
                now = time.monotonic()
                waits = [begun + patience - now for _, begun in self._running.values() if begun + patience > now]
                is_next = bool(self._queue) and len(self._running) < self._num_threads
                if not waits and not is_next:
                    self._cancel(lambda _request: True)  # all threads hang
                    return self._num_ended == len(self._requests)
                self._call_ended.wait(min(waits, default=0.001))

    def stop(self) -> None:
        """End the threads after all requested calls."""
        with self._lock:
            self._stopped = True
            self._work_came.notify_all()

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue:
                    if self._stopped:
                        return
                    self._work_came.wait()
                call, asked = self._begin()
            if not self._make(call, asked):
                return

    def _begin(self) -> tuple[Callable[[], bool], _Request]:
        call, asked = self._queue.popleft()
        begun = time.monotonic()
        asked.begun = min(asked.begun, begun)
        self._running[threading.get_ident()] = asked, begun
        return call, asked

    def _make(self, call: Callable[[], bool], asked: _Request) -> bool:
        """Returns False if the thread has been replaced."""
        try:
            succeeded = asked.succeeded and call()
        except Exception:  # the server must survive any error of the backend
            logger.exception("sglang-lazy: the storage backend failed")
            succeeded = False
        with self._lock:
            replaced = self._running.pop(threading.get_ident(), None) is None
            self._num_stuck = max(0, self._num_stuck - replaced)
            asked.ended = time.monotonic()
            self._end_call(asked, succeeded)
        return not replaced

    # With the lock

    def _replace(self, threads: Sequence[int]) -> None:
        """As many of them as may hang."""
        for thread in threads[: MAX_STUCK - self._num_stuck]:
            del self._running[thread]
            self._num_stuck += 1
            self._start_thread()

    def _cancel(self, which: Callable[[_Request], bool]) -> None:
        kept = collections.deque[tuple[Callable[[], bool], _Request]]()
        for call, asked in self._queue:
            if which(asked):
                self._end_call(asked, False)
            else:
                kept.append((call, asked))
        self._queue = kept

    def _end_call(self, asked: _Request, succeeded: bool) -> None:
        asked.succeeded = asked.succeeded and succeeded
        asked.num_left -= 1
        self._num_ended += asked.num_left == 0 and not asked.dropped
        self._call_ended.notify_all()

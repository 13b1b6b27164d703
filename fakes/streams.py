"""CPU streams whose transfers happen as late as a GPU allows: queued work runs when something waits for it."""

import collections
import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterator


class Stream:
    """A queue of work, in order. The main stream runs everything at once.

    cuda_stream: the handle that copy engines are given; here the stream itself.
    """

    def __init__(self):
        self.cuda_stream = self
        self.queued: collections.deque[Callable[[], None]] = collections.deque()

    def do(self, work: Callable[[], None]) -> None:
        if self is MAIN:
            work()
        else:
            self.queued.append(work)

    def advance(self) -> None:
        self.queued.popleft()()

    def wait_event(self, event: "Event") -> None:
        self.do(event.waiting())

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for: `stream` is that of forward passes, which a CPU runs at once."""


MAIN = Stream()
_current = MAIN


class Event:
    """A query that finds it pending runs one step of its stream, so work that nobody waits for completes in time.

    May be recorded again: who waits waits for the record that is the last when it is told to.
    """

    def __init__(self):
        self._stream, self._come = MAIN, [True]  # of the last record; `_come` is empty until it has come

    def record(self, stream: Stream | None = None) -> None:
        self._stream, self._come = stream or _current, []
        self._stream.do(functools.partial(self._come.append, True))

    def query(self) -> bool:
        if not self._come:
            self._stream.advance()
        return bool(self._come)

    def synchronize(self) -> None:
        self.waiting()()

    def waiting(self) -> Callable[[], None]:
        """What waits for the last record so far."""
        stream, come = self._stream, self._come

        def wait() -> None:
            while not come:
                stream.advance()

        return wait

    def wait(self, stream: Stream) -> None:
        stream.wait_event(self)


@contextlib.contextmanager
def stream(entered: Stream) -> Iterator[None]:
    global _current
    before, _current = _current, entered
    try:
        yield
    finally:
        _current = before


def current_stream() -> Stream:
    return _current


def load() -> None:
    """The SGLang plugin: late copies in each process that SGLang starts, until it exits."""
    if multiprocessing.parent_process() is None:
        return
    from fakes.late_copies import late_transfers
    from sglang_lazy.storage import tiers

    tiers.Transfers = late_transfers

"""CPU streams whose transfers happen as late as a GPU allows: queued work runs when something waits for it."""

import collections
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator


class Stream:
    """A queue of work, in order. The main stream runs everything at once."""

    def __init__(self):
        self.queued: collections.deque[Callable[[], None]] = collections.deque()

    def do(self, work: Callable[[], None]) -> None:
        if self is MAIN:
            work()
        else:
            self.queued.append(work)

    def advance(self) -> None:
        self.queued.popleft()()

    def wait_event(self, event: "Event") -> None:
        self.do(event.synchronize)

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for: `stream` is that of forward passes, which a CPU runs at once."""


MAIN = Stream()
_current = MAIN


class Event:
    """A query that finds it pending runs one step of its stream, so work that nobody waits for completes in time."""

    def __init__(self):
        self._stream, self._num_to_come = MAIN, 0  # records; the last one counts

    def record(self) -> None:
        self._stream = _current
        self._num_to_come += 1
        _current.do(self._come)

    def _come(self) -> None:
        self._num_to_come -= 1

    @property
    def _done(self) -> bool:
        return not self._num_to_come

    def query(self) -> bool:
        if not self._done:
            self._stream.advance()
        return self._done

    def synchronize(self) -> None:
        while not self._done:
            self._stream.advance()

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

"""Threads for long work on one request, during which the event loop serves the others."""

import asyncio
import contextvars
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LARGE = 1 << 16
"""From this many characters or bytes on, a request's work is done in a thread: tokenizing them takes tens of
milliseconds, and the way to a thread and back a tenth of one."""
TURN = 0.02
"""Seconds for which one request may work before others have their turn."""


class _Turn:
    """Of a request with all its tasks.  since: when it began to work, or had others served last."""

    def __init__(self) -> None:
        self.since = time.monotonic()  # the event loop's own clock stands still while it works


_turn: contextvars.ContextVar[_Turn | None] = contextvars.ContextVar("turn", default=None)
"""The present request's."""
# Two: they share Python's lock with the event loop, which would wait for its turn among many.
_threads = ThreadPoolExecutor(2, "sglang-lazy-request")


def num_characters(texts: Any) -> int:
    """The length of a text, or of all texts of lists of them."""
    return len(texts) if isinstance(texts, str) else sum(map(num_characters, texts or ()))


async def in_thread(size: int, function: Callable[..., T], *args: Any) -> T:
    """The result of `function`, called in a thread if `size` is `LARGE`.  size: of its input."""
    if size < LARGE:
        return function(*args)
    call = partial(contextvars.copy_context().run, function, *args)
    return await asyncio.get_running_loop().run_in_executor(_threads, call)


def begin_turn() -> None:
    """Called when a request begins, before it starts tasks, which share its turn."""
    _turn.set(_Turn())


async def give_way() -> None:
    """Have other requests served if this one has worked for long. Called before each prompt of a batch."""
    turn = _turn.get()
    while turn is not None and time.monotonic() - (since := turn.since) >= TURN:
        await asyncio.sleep(0)
        if turn.since == since:  # of the tasks that gave way together, the first begins the next turn
            turn.since = time.monotonic()


class Outcome(Generic[T]):
    """A call that has been made: calling this returns its result, or raises its error."""

    def __init__(self, function: Callable[..., T], *args: Any):
        self._error: BaseException | None = None
        try:
            self._result = function(*args)
        except BaseException as error:  # as for whoever would have made the call
            self._error = error

    def __call__(self, *_args: Any) -> T:
        if self._error is not None:
            raise self._error
        return self._result


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits. Raises RuntimeError if it does."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError(f"it waits: {coroutine}")

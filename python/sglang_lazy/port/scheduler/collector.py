"""Keep Python's garbage collector from pausing the scheduler: a full collection visits every object.

The objects of SGLang's modules and of cached chunks are many and long-lived: with 50,000 chunks, a collection would
stop the scheduler for a second. So they are frozen, which exempts them from collection; reference counting still frees
them.
"""

import gc
from typing import Any

from sglang_lazy.port.hooks import feature
from sglang_lazy.port.scheduler.steps import admission_of

COLLECTIONS = 2
"""Freeze after so many collections of the middle generation, each after some thousands of new objects."""


def set_aside(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.__init__`: freeze all objects, which will stay."""
    if admission_of(scheduler) is not None:
        gc.collect()
        gc.freeze()


def on_idle(scheduler: Any) -> None:
    """Before `Scheduler.on_idle`, which may sleep until a request comes: collect, and freeze what is left. Nothing runs
    or waits, so these objects will stay."""
    if gc.get_count()[2] >= COLLECTIONS and scheduler.is_fully_idle() and admission_of(scheduler) is not None:
        gc.collect()
        gc.freeze()


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    feature(f"{_SCHEDULER}.__init__", set_aside, "AFTER", "garbage collection does not visit what stays"),
    feature(f"{_SCHEDULER}.on_idle", on_idle, "BEFORE", "garbage is collected when nobody waits"),
)

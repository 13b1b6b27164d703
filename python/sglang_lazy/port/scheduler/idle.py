"""What a scheduler does while nothing runs: metrics, garbage collection, a check that nothing is locked.

Python's garbage collector must not pause the scheduler, and a full collection visits every object. Those of SGLang's
modules and of cached chunks are many and long-lived: with 50,000 chunks, a collection would stop the scheduler for a
second. So they are frozen, which exempts them from collection; reference counting still frees them.
"""

import gc
from collections.abc import Callable
from typing import Any

from sglang_lazy.port.hooks import feature, required
from sglang_lazy.port.scheduler import chunk_metrics
from sglang_lazy.port.scheduler.steps import admission_of

COLLECTIONS = 2
"""Freeze after so many collections of the middle generation, each after some thousands of new objects."""


def set_aside(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.__init__`: freeze all objects, which will stay."""
    if admission_of(scheduler) is not None:
        gc.collect()
        gc.freeze()


def on_idle(original: Callable, scheduler: Any) -> None:
    """Around `Scheduler.on_idle`, which may sleep until a request comes, and logs statistics every 30 seconds."""
    chunk_metrics.publish(scheduler.metrics_collector)
    collect(scheduler)
    original(scheduler)
    check(scheduler)


def collect(scheduler: Any) -> None:
    """Collect, and freeze what is left: nothing runs or waits, so these objects will stay."""
    if gc.get_count()[2] >= COLLECTIONS and scheduler.is_fully_idle() and admission_of(scheduler) is not None:
        gc.collect()
        gc.freeze()


def check(scheduler: Any) -> None:
    """Nothing is locked when nothing runs."""
    admission = admission_of(scheduler)
    if admission is not None and scheduler.is_fully_idle():
        admission.check_idle()


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    feature(f"{_SCHEDULER}.__init__", set_aside, "AFTER", "garbage collection does not visit what stays"),
    required(f"{_SCHEDULER}.on_idle", on_idle, "AROUND", "scheduler", "an idle scheduler checks its locks"),
)

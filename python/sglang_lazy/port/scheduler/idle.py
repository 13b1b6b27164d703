"""What a scheduler does while nothing runs: metrics, garbage collection, a check that nothing is locked.

Python's garbage collector must not pause the scheduler, and a full collection visits every object. Those of SGLang's
modules and of cached chunks are many and long-lived: with 50,000 chunks, a collection would stop the scheduler for a
second. So they are frozen, which exempts them from collection; reference counting still frees them.
"""

import gc
from collections.abc import Callable
from typing import Any

from sglang_lazy.port.facts import admission_of
from sglang_lazy.port.hooks import on
from sglang_lazy.port.scheduler import reports

COLLECTIONS = 2
"""Freeze after so many collections of the middle generation, each after some thousands of new objects."""


def set_aside(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.__init__`: freeze all objects, which will stay."""
    if admission_of(scheduler) is not None:
        gc.collect()
        gc.freeze()


def on_idle(original: Callable, scheduler: Any) -> None:
    """Around `Scheduler.on_idle`, which may sleep until a request comes, and logs statistics every 30 seconds."""
    reports.publish(scheduler.metrics_collector)
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


def is_fully_idle(
    original: Callable, scheduler: Any, for_health_check: bool = False, ignore_waiting: bool = False
) -> bool:
    """Around `Scheduler.is_fully_idle`: not while the tree of chunks copies, since SGLang asks only the tree of text.

    And a paused scheduler is idle if nothing has a row, whoever asks: in SGLang a flush that may wait, unlike one that
    may not, would wait for its queue.
    """
    if for_health_check:
        return original(scheduler, for_health_check, ignore_waiting)
    idle = original(scheduler, for_health_check, ignore_waiting or scheduler._engine_paused)
    return idle and (admission_of(scheduler) is None or not scheduler.tree_cache.is_copying)


_SCHEDULER = on("sglang.srt.managers.scheduler.Scheduler")
HOOKS = (
    _SCHEDULER.required(
        "is_fully_idle", is_fully_idle, "AROUND", "scheduler", "a scheduler that copies chunks is not idle"
    ),
    _SCHEDULER.feature("__init__", set_aside, "AFTER", "garbage collection does not visit what stays"),
    _SCHEDULER.required("on_idle", on_idle, "AROUND", "scheduler", "an idle scheduler checks its locks"),
)

"""Python's garbage collector, in the scheduler: a full collection looks at every object there is.

Those of SGLang's modules and of cached chunks are many and live long: with 50,000 chunks it would stop the scheduler
for a second. So they are set aside, where no collection sees them: they still go when nobody refers to them.
"""

import gc
from typing import Any

from sglang_lazy.port.hooks import Hook
from sglang_lazy.port.scheduler.steps import admission_of

COLLECTIONS = 2
"""What has survived so many collections of young objects, each of some thousands, is set aside next."""


def set_aside(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.__init__`: what is there will stay."""
    if admission_of(scheduler) is not None:
        gc.collect()
        gc.freeze()


def on_idle(scheduler: Any) -> None:
    """Before `Scheduler.on_idle`, which may sleep until a request comes. Nothing runs or waits, so what is no garbage
    is there to stay."""
    if gc.get_count()[2] >= COLLECTIONS and scheduler.is_fully_idle() and admission_of(scheduler) is not None:
        gc.collect()
        gc.freeze()


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (Hook(f"{_SCHEDULER}.__init__", set_aside, "AFTER"), Hook(f"{_SCHEDULER}.on_idle", on_idle, "BEFORE"))

"""Hooks on SGLang's LoRA: each adapter has its own chunks, and fills need the adapter of their parents."""

from collections.abc import Callable
from typing import Any

from sglang_lazy.core.state import fill_of
from sglang_lazy.port.hooks import Hook
from sglang_lazy.port.scheduler.steps import admission_of


def can_schedule(original: Callable, scheduler: Any, req: Any, running_adapters: set[str | None]) -> bool:
    """Around `Scheduler._can_schedule_lora_req`: if a fill is left out of a batch, leave out its parents, too.

    SGLang continues with the next request, and an adapter that is being loaded may be ready when it reaches the parent.
    """
    admission = admission_of(scheduler)
    if admission is None:
        return original(scheduler, req, running_adapters)
    if req.lora_id in admission.left_out_adapters:
        return False
    fits = original(scheduler, req, running_adapters)
    if not fits and fill_of(req) is not None:
        admission.left_out_adapters.add(req.lora_id)
    return fits


def unload_adapter(scheduler: Any, message: Any) -> None:
    """Before `Scheduler.unload_lora_adapter`: forget the adapter's chunks, since it gets a new id if loaded again. A
    fill that the last request with it has left ends before the next batch."""
    if (admission := admission_of(scheduler)) is not None:
        admission.control.forget_adapter(message.lora_id)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(f"{_SCHEDULER}._can_schedule_lora_req", can_schedule, "AROUND"),
    Hook(f"{_SCHEDULER}.unload_lora_adapter", unload_adapter, "BEFORE"),
)

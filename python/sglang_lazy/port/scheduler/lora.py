"""Hooks on SGLang's LoRA: each adapter has its own chunks, and fills need the adapter of their parents."""

from collections.abc import Callable
from typing import Any

from sglang_lazy.core.state import fill_of
from sglang_lazy.port.hooks import feature
from sglang_lazy.port.repairs.operators import postpone, requests_with_rows
from sglang_lazy.port.scheduler.steps import admission_of


def can_schedule(original: Callable, scheduler: Any, req: Any, running_adapters: set[str | None]) -> bool:
    """Around `Scheduler.can_schedule_lora_req`: if a fill is left out of a batch, leave out its parents, too.

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


def unload_adapter(unload: Callable, scheduler: Any, message: Any) -> Any:
    """Around `Scheduler.unload_lora_adapter`: once nothing uses the adapter, forget its chunks, since it gets a new id
    if loaded again, and unload it. Until then, returns None.

    Clients have their answers or have left, but an aborted request ends with the next step, as does a fill that one of
    them has started.
    """
    admission, adapter = admission_of(scheduler), message.lora_id
    waiting = (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue)
    if any(req.lora_id == adapter and not req.finished() for req in (*waiting, *requests_with_rows(scheduler))):
        postpone(scheduler, message)
        return None
    if admission is not None:
        admission.control.forget_adapter(adapter)
    return unload(scheduler, message)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    feature(
        f"{_SCHEDULER}.can_schedule_lora_req", can_schedule, "AROUND", "a prompt waits for the adapter of its fill"
    ),
    feature(
        f"{_SCHEDULER}.unload_lora_adapter", unload_adapter, "AROUND", "an unloaded adapter's chunks are forgotten"
    ),
)

"""Hooks on SGLang's LoRA: each adapter has its own chunks, and fills need the adapter of their parents."""

from collections.abc import Callable, Iterator
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


def unload_adapter(unload: Callable, scheduler: Any, message: Any) -> Any:
    """Around `Scheduler.unload_lora_adapter`: once nothing uses the adapter, forget its chunks, since it gets a new id
    if loaded again, and unload it. Returns None if that must wait, for `finish_unloading`.

    Clients have their answers or have left, but an aborted request ends with the next step, and a fill that one of them
    started may still run.
    """
    admission, adapter = admission_of(scheduler), message.lora_id
    chunked = scheduler.chunked_req
    if chunked is not None and fill_of(chunked) is not None and chunked.lora_id == adapter:
        scheduler._pending_chunked_abort_req = chunked
    if any(req.lora_id == adapter and not req.finished() for req in _requests(scheduler)):
        vars(scheduler).setdefault(_WAITING, []).append(message)
        return None
    if admission is not None:
        admission.control.forget_adapter(adapter)
    return unload(scheduler, message)


def _requests(scheduler: Any) -> Iterator[Any]:
    """All that may still be computed."""
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    for batch in (scheduler.running_batch, scheduler.last_batch):
        yield from () if batch is None else batch.reqs
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def finish_unloading(_result: Any, scheduler: Any, _messages: list[Any]) -> None:
    """After `Scheduler.process_input_requests`, once a step: unload adapters that nothing uses any more."""
    for message in vars(scheduler).pop(_WAITING, ()):
        output = scheduler.unload_lora_adapter(message)
        if output is not None:
            scheduler.ipc_channels.send_to_tokenizer.send_output(output, message)


_WAITING = "_sglang_lazy_unloading"
"""Attribute of a scheduler with messages to unload adapters that are still in use."""
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    Hook(f"{_SCHEDULER}._can_schedule_lora_req", can_schedule, "AROUND"),
    Hook(f"{_SCHEDULER}.unload_lora_adapter", unload_adapter, "AROUND"),
    Hook(f"{_SCHEDULER}.process_input_requests", finish_unloading, "AFTER"),
)

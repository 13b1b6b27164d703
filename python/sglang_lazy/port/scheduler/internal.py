"""Hooks for internal requests, the fills and probes: they decode nothing, and end when nobody waits for them."""

from collections.abc import Callable
from typing import Any

from sglang_lazy.core.state import is_internal
from sglang_lazy.port.hooks import feature, required
from sglang_lazy.port.scheduler.steps import admission_of


def get_next_batch_to_run(original: Callable, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Around `Scheduler.get_next_batch_to_run`: remove internal requests from the last batch before it is merged into
    the running one, and abort the one in chunked prefill if nobody waits for it any more. No other can be aborted: its
    last piece is under way."""
    was_prefill = last_batch is not None and last_batch.forward_mode.is_extend()
    if was_prefill and (internal := [req for req in last_batch.reqs if is_internal(req)]):
        last_batch.filter_batch(reqs_to_exclude=internal)
        running_batch.batch_is_full = False
    if (admission := admission_of(scheduler)) is not None:
        if admission.is_abandoned(scheduler.chunked_req):
            scheduler._pending_chunked_abort_req = scheduler.chunked_req
            scheduler.process_pending_chunked_abort()
        admission.make_room_to_go_on(running_batch.reqs)
    return original(scheduler, running_batch, last_batch)


def send_abort_output(send: Callable, scheduler: Any, message: Any, req: Any) -> None:
    """Around `Scheduler.send_abort_output`: no client is to be told of an internal request."""
    if not is_internal(req):
        send(scheduler, message, req)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    required(
        f"{_SCHEDULER}.get_next_batch_to_run",
        get_next_batch_to_run,
        "AROUND",
        "scheduler",
        "fills and probes end after their prefill",
    ),
    feature(
        f"{_SCHEDULER}.send_abort_output",
        send_abort_output,
        "AROUND",
        "no client hears of the end of an internal request",
    ),
)

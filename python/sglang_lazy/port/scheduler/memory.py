"""Hooks that have accepted requests answered when memory or the queue's places run out."""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import retract_all

from sglang_lazy.core.state import is_ahead
from sglang_lazy.port.hooks import required
from sglang_lazy.port.scheduler.steps import admission_of


def update_running_batch(update: Callable, scheduler: Any, batch: Any) -> Any:
    """Around `Scheduler.update_running_batch`, which aborts the last request that it could not retract, if there is no
    slot for its next token: pins end first, and a prompt in chunked prefill, which is not in the batch, starts anew."""
    admission = admission_of(scheduler)
    if admission is not None and admission.may_lack_slots(len(batch.reqs)):
        left = [i for i, req in enumerate(batch.reqs) if not req.finished()]
        while len(left) == 1 and not batch.check_decode_mem(left):
            if not admission.give_up_pins() and not _retract_chunked(scheduler):
                break
    return update(scheduler, batch)


def _retract_chunked(scheduler: Any) -> bool:
    """Put the request in chunked prefill back into the queue; returns False if there is none."""
    req, scheduler.chunked_req = scheduler.chunked_req, None
    if req is None:
        return False
    retract_all(
        reqs=[req],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )
    scheduler._add_request_to_queue(req, is_retracted=True)
    return True


def abort_on_queued_limit(refuse: Callable, scheduler: Any, req: Any) -> bool:
    """Around `Scheduler._abort_on_queued_limit`: a request that was retracted had its place in the queue before, and
    those that compute chunks ahead of use take none."""
    if scheduler.max_queued_requests is None or req.retracted_stain:
        return False
    queue = scheduler.waiting_queue
    scheduler.waiting_queue = [other for other in queue if not is_ahead(other)]
    refused = refuse(scheduler, req)
    left = set(scheduler.waiting_queue)  # SGLang may drop somebody else
    scheduler.waiting_queue = [other for other in queue if is_ahead(other) or other in left]
    return refused


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    required(
        f"{_SCHEDULER}.update_running_batch",
        update_running_batch,
        "AROUND",
        "scheduler",
        "pins end before a running request is aborted for memory",
    ),
    required(
        f"{_SCHEDULER}._abort_on_queued_limit",
        abort_on_queued_limit,
        "AROUND",
        "scheduler",
        "chunks computed ahead of use take no places in the queue",
    ),
)

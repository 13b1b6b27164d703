"""Hooks on SGLang's scheduler: where its steps meet chunk admission. Each is registered in `plugin.HOOKS`."""

from collections.abc import Callable

from sglang.srt.managers.schedule_batch import Req

from sglang_lazy.attention.table import table_of
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.state import requested_layout
from sglang_lazy.port.radix import LazyRadixCache
from sglang_lazy.scheduler.admission import ChunkAdmission, is_fill, is_linked


def admission_of(scheduler) -> ChunkAdmission | None:
    """The scheduler's admission, or None where it serves without chunk reuse."""
    return getattr(scheduler.tree_cache, "admission", None)


def attach_admission(_result, scheduler, *_args, **_kwargs) -> None:
    """After `Scheduler.__init__`: put admission beside a cache that can hold chunks."""
    if isinstance(scheduler.tree_cache, LazyRadixCache):
        config = LazyConfig.from_env()
        scheduler.tree_cache.admission = ChunkAdmission(
            scheduler, scheduler.tree_cache, config.max_chunks, materialize=config.link == "materialize"
        )


def add_request_to_queue(original, scheduler, req: Req, *args, **kwargs) -> None:
    """Around `Scheduler._add_request_to_queue`, the one way into the waiting queue, retracted requests included."""
    admission = admission_of(scheduler)
    if admission is None:
        if req.to_finish is None and requested_layout(req) is not None:
            req.set_finish_with_abort("this server runs without chunk reuse: it takes chunks only with link full")
    elif is_fill(req):
        return admission.requeue_fill(req)
    else:
        admission.arrive(req)
        if is_linked(req):
            admission.linked_waiting = True
            if admission.forming:
                admission.late.append(req)
                return None
    return original(scheduler, req, *args, **kwargs)


def get_next_batch_to_run(original, scheduler, running_batch, last_batch):
    """Around `Scheduler.get_next_batch_to_run`: fills leave the last batch before it is merged into the running one."""
    was_prefill = last_batch is not None and last_batch.forward_mode.is_extend()
    if was_prefill and (fills := [req for req in last_batch.reqs if is_fill(req)]):
        last_batch.filter_batch(chunked_req_to_exclude=fills)
        running_batch.batch_is_full = False
    return original(scheduler, running_batch, last_batch)


def get_new_batch_prefill_raw(original, scheduler, prefill_delayer_single_pass, running_batch):
    """Around `Scheduler._get_new_batch_prefill_raw`: show it only what can run, and put the others back in order."""
    admission = admission_of(scheduler)
    if admission is None:
        return original(scheduler, prefill_delayer_single_pass, running_batch)
    if running_batch.is_empty():
        running_batch.batch_is_full = False  # with nothing running, nothing else would clear it
    waiting = scheduler.waiting_queue
    visible = admission.visible_queue(running_batch)
    if visible is not waiting:
        scheduler.waiting_queue = visible.copy()
    admission.forming = True
    batch, running_batch = original(scheduler, prefill_delayer_single_pass, running_batch)
    admission.forming = False
    if visible is not waiting:
        shown, left = set(visible), set(scheduler.waiting_queue)
        added = [req for req in scheduler.waiting_queue if req not in shown]
        scheduler.waiting_queue = [req for req in waiting if req not in shown or req in left] + added
    while admission.late:
        scheduler._add_request_to_queue(admission.late.pop(0))
    admission.reconcile()
    if batch is None and visible and running_batch.is_empty() and scheduler.chunked_req is None:
        admission.revoke_newest()
    return batch, running_batch


def prepare_for_extend(_result, batch) -> None:
    """After `ScheduleBatch.prepare_for_extend`, which assigns the rows: enter the chunks and segments of each row."""
    table = table_of(batch.req_to_token_pool)
    if table is None:
        return
    batch.tree_cache.admission.launch(batch)
    for req in batch.reqs:
        if is_linked(req) and req.link.materialize and req.link.copy is None:
            batch.tree_cache.allocate_copy(req)
    table.assign({req.req_pool_idx: req.link.segments if is_linked(req) else () for req in batch.reqs})


def on_idle(_result, scheduler) -> None:
    """After `Scheduler.on_idle`: nothing may be locked when nothing runs."""
    admission = admission_of(scheduler)
    if admission is not None and scheduler.is_fully_idle():
        admission.check_idle()


def report_reuse(accumulator, *, get_cached_tokens_details: Callable, **kwargs) -> tuple[tuple, dict]:
    """Before `_GenerationStreamAccumulator.__init__`, once a step: where it asks for details, give those of chunks too.

    It asks with every token of every request, so a hook on what it asks would be the dearest of all to plain traffic.
    """

    def details(req: Req) -> dict | None:
        return get_cached_tokens_details(req) if getattr(req, "link", None) is None else cached_tokens_details(req)

    return (accumulator,), {**kwargs, "get_cached_tokens_details": details}


def cached_tokens_details(req: Req) -> dict:
    """What results say of a linked request's reused tokens: among them those that came from chunks."""
    hits = f"{req.link.hit_mask:x}"  # a string: with many chunks it outgrows the integers that a message may hold
    return {"device": req.cached_tokens, "host": 0, "chunk": req.link.num_reused_tokens, "chunk_hits": hits}

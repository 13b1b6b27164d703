"""Hooks on what SGLang lets into a batch: by its policy (arrival, priority, or cached prefix), and by adapters."""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import (
    IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD,
    AddReqResult,
    CacheAwarePolicy,
)

from sglang_lazy.core.state import fill_of, is_internal, linked, stand_in
from sglang_lazy.port.facts import admission_of
from sglang_lazy.port.hooks import Hooks

HOOKS = Hooks()
_SCHEDULE_POLICY = HOOKS.on("sglang.srt.managers.schedule_policy.SchedulePolicy")
_PREFILL_ADDER = HOOKS.on("sglang.srt.managers.schedule_policy.PrefillAdder")


@_SCHEDULE_POLICY.required(
    "calc_priority", "AROUND", "scheduler", "batch formation sees what can run, fills before their parents"
)
def calc_priority(
    original: Callable, policy: Any, waiting_queue: list[Any], running_batch: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Around `SchedulePolicy.calc_priority`, which sorts the queue before a batch is formed: leave only requests that
    can run, with fills before their parents."""
    admission = admission_of(policy)
    if admission is None:
        return original(policy, waiting_queue, running_batch, *args, **kwargs)
    by_prefix = isinstance(policy._determine_active_policy(waiting_queue), CacheAwarePolicy)
    with policy.tree_cache.ranking(by_prefix):
        original(policy, waiting_queue, running_batch, *args, **kwargs)
    admission.show(waiting_queue, running_batch.reqs)


@_SCHEDULE_POLICY.feature(
    "_compute_prefix_matches", "AFTER", "chunks do not count as prefixes that others will compute"
)
def compute_prefix_matches(put_off: set[str], _policy: Any, waiting_queue: list[Any], *_args: Any) -> set[str]:
    """After `SchedulePolicy._compute_prefix_matches`, which defers requests whose prefix another request will compute.

    Only the leading text of a linked request counts as such a prefix, since chunks are computed once in any case.
    """
    for req in waiting_queue:
        state = linked(stand_in(req)) if req.rid in put_off else None
        if state is not None and state.prompt.num_leading_tokens < IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD:
            put_off.discard(req.rid)
    return put_off


@_PREFILL_ADDER.feature("preempt_to_schedule", "AROUND", "nobody is preempted for fills and their parents")
def preempt_to_schedule(original: Callable, adder: Any, *args: Any) -> bool:
    """Around `PrefillAdder.preempt_to_schedule`, which makes room for a request where there is no place for it: not
    while internal requests have places, which they give back soon, or a parent would take two. Keep the locks on chunks
    of parents that are shown to the batch, since it evicts more than it frees."""
    admission = admission_of(adder)
    if admission is None:
        return original(adder, *args)
    if admission.internal or any(map(is_internal, adder.can_run_list)):
        return False
    admission.keeps_locks = True
    try:
        return original(adder, *args)
    finally:
        admission.keeps_locks = False


@_PREFILL_ADDER.required("add_one_req", "AROUND", "scheduler", "a batch ends after a fill that fits only in part")
def add_one_req(original: Callable, adder: Any, req: Any, has_chunked_req: bool, *args: Any, **kwargs: Any) -> Any:
    """Stop after a request that fits only in part, since it may be a fill. SGLang would continue if the pool of window
    KV has cut it and the batch has room.

    Only users' requests count for --prefill-max-requests and for the delay of prefills.
    """
    if has_chunked_req or adder.new_chunked_req is not None:
        return AddReqResult.OTHER
    admission = admission_of(adder)
    if admission is not None:
        adder.waiting_queue_len = admission.num_waiting
    if (most := adder.prefill_max_requests) is not None:
        adder.prefill_max_requests = most + sum(map(is_internal, adder.can_run_list))
    result = original(adder, req, has_chunked_req, *args, **kwargs)
    adder.prefill_max_requests = most
    return result


@HOOKS.on("sglang.srt.managers.scheduler.Scheduler").feature(
    "can_schedule_lora_req", "AROUND", "a prompt waits for the adapter of its fill"
)
def can_schedule(original: Callable, scheduler: Any, req: Any, running_adapters: set[str | None]) -> bool:
    """If a fill is left out of a batch, leave out its parents, too.

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

"""Hooks on SGLang's order of the queue: by arrival, by priority, or by what is cached."""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD, AddReqResult

from sglang_lazy.core.state import linked, stand_in
from sglang_lazy.port.hooks import Hook


def calc_priority(original: Callable, policy: Any, waiting_queue: list[Any], running_batch: Any = None) -> None:
    """Around `SchedulePolicy.calc_priority`, which puts the queue in order before a batch is formed from it: leave what
    can run, with fills before their parents."""
    admission = getattr(policy.tree_cache, "admission", None)
    if admission is None:
        return original(policy, waiting_queue, running_batch)
    with policy.tree_cache.ranking():
        original(policy, waiting_queue, running_batch)
    admission.show(waiting_queue, running_batch)


def compute_prefix_matches(put_off: set[str], _policy: Any, waiting_queue: list[Any], *_args: Any) -> set[str]:
    """After `SchedulePolicy._compute_prefix_matches`, which puts off those whose beginning another request computes.

    Chunks are computed once in any case, so the beginning of a linked request is its leading text.
    """
    for req in waiting_queue:
        state = linked(stand_in(req)) if req.rid in put_off else None
        if state is not None and state.prompt.num_leading_tokens < IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD:
            put_off.discard(req.rid)
    return put_off


def preempt_to_schedule(original: Callable, adder: Any, *args: Any) -> bool:
    """Around `PrefillAdder.preempt_to_schedule`, which evicts beyond what it frees: parents that are shown to the batch
    keep their chunks."""
    admission = getattr(adder.tree_cache, "admission", None)
    if admission is None:
        return original(adder, *args)
    admission.keeps_locks = True
    try:
        return original(adder, *args)
    finally:
        admission.keeps_locks = False


def add_one_req(original: Callable, adder: Any, req: Any, has_chunked_req: bool, *args: Any, **kwargs: Any) -> Any:
    """Around `PrefillAdder.add_one_req`: behind a request of which only a piece fits, nothing is added, since that may
    be a fill. SGLang goes on if the pool of window KV has cut it, and the batch has room."""
    if has_chunked_req or adder.new_chunked_req is not None:
        return AddReqResult.OTHER
    return original(adder, req, has_chunked_req, *args, **kwargs)


_MODULE = "sglang.srt.managers.schedule_policy"
HOOKS = (
    Hook(f"{_MODULE}.SchedulePolicy.calc_priority", calc_priority, "AROUND"),
    Hook(f"{_MODULE}.SchedulePolicy._compute_prefix_matches", compute_prefix_matches, "AFTER"),
    Hook(f"{_MODULE}.PrefillAdder.add_one_req", add_one_req, "AROUND"),
    Hook(f"{_MODULE}.PrefillAdder.preempt_to_schedule", preempt_to_schedule, "AROUND"),
)

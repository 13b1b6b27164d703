"""A server whose /server_info counts what requests hold, in the scheduler and in the HTTP process, by SGLang's own
counters and those of the cache: all are zero when nobody asks anything."""

import functools
from typing import Any

NAME = "leftovers"
PASSES = "passes"
"""The one number that does not return to zero: the forward passes so far."""


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.managers import tokenizer_manager
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    tokenizer_manager._REQUEST_STATE_WAIT_TIMEOUT = 0.5  # seconds until it looks whether a client is still there
    of_scheduler, of_all = Scheduler.get_internal_state, TokenizerManager.get_internal_state

    @functools.wraps(of_scheduler)
    def get_internal_state(scheduler: Any, *args: Any) -> Any:
        result = of_scheduler(scheduler, *args)
        result.internal_state[NAME] = held(scheduler)
        return result

    @functools.wraps(of_all)
    async def get_internal_states(manager: Any) -> list[dict]:
        states = await of_all(manager)
        for state in states:
            state[NAME] |= held_for_clients(manager)
        return states

    Scheduler.get_internal_state = get_internal_state
    TokenizerManager.get_internal_state = get_internal_states


def held(scheduler: Any) -> dict[str, int]:
    """What the scheduler's process holds."""
    rows, slots, cache = scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    store = cache.admission.store
    chunked, last = scheduler.chunked_req, scheduler.last_batch
    numbers = {
        PASSES: scheduler.forward_ct,
        "waiting": len(scheduler.waiting_queue),
        "running": len(scheduler.running_batch.reqs),
        "launched": 0 if last is None else len(last.reqs),
        "half computed": chunked is not None,
        "internal and half computed": chunked is not None and chunked.rid.startswith("\0"),
        "rows": rows.size - rows.available_size(),
        "slots": slots.size - slots.available_size() - cache.evictable_size(),
        "protected slots": cache.protected_size(),
        "locks": store.tree.num_locks,
        "pending chunks": len(store.pending),
        "chunks on their way from storage": len(store.fetching),
        "holders of locks": len(cache.admission.holders),
        "host slots": 0,
        "locked states": 0 if store.states is None else store.states.num_locked,
    }
    if (host := store.host) is not None:
        nodes = [store.tree.root]
        numbers["host slots"] = host.memory.slots.size - host.memory.slots.num_free
        while nodes:
            nodes += (node := nodes.pop()).children.values()
            numbers["host slots"] -= 0 if node.host is None else len(node.host.slots)
        numbers["copies"] = sum(map(len, host._under_way))
    return {name: int(number) for name, number in numbers.items()}


def held_for_clients(manager: Any) -> dict[str, int]:
    """What the HTTP process holds."""
    counters = manager.lora_registry._counters.values() if manager.server_args.enable_lora else ()
    return {
        "requests": len(manager.rid_to_state),
        "requests per adapter": sum(counter.value() for counter in counters),
    }

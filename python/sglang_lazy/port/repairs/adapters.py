"""Uses of LoRA adapters, which must end before an adapter is unloaded.

SGLang counts them: up when a request names an adapter, by the number of its samples, and down when a sample ends. Of
samples that are never sent, because a check refuses their prompt or its client leaves, it counts only one down. Then
unloading waits for ever, and whoever names the adapter with it. Here nothing is counted: an adapter is in use while the
state of a request has its id, and every way out of the tokenizer manager removes that state. What the scheduler still
computes then, `port/scheduler/control.py` waits for.

With several tokenizer workers, each has a registry of its own: the others would go on sending the id of an adapter that
one of them has unloaded, which ends the scheduler.

Can go once SGLang's uses end with the states of requests, and its workers share one registry.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import LoRAUpdateOutput

from sglang_lazy.port.hooks import on

POLL = 0.02
"""Seconds between two looks at the states of requests while an adapter waits to be unloaded."""


def show_states(_result: Any, manager: Any) -> None:
    """After `TokenizerManager.init_lora`: show the states of requests to the registry."""
    manager.lora_registry.request_states = manager.rid_to_state


async def acquire(_count: Callable, registry: Any, names: str | list[str | None]) -> str | None | list[str | None]:
    """Around `LoRARegistry.acquire`: look ids up, without counting.

    It must not let other tasks run: no adapter may be unloaded between the lookup and when the request has the id.

    Raises ValueError for an adapter that was unloaded after SGLang had checked that it is loaded.
    """
    loaded = registry.get_all_adapters()

    def id_of(name: str | None) -> str | None:
        if name is not None and name not in loaded:
            raise ValueError(f"LoRA adapter {name!r:.80} has just been unloaded")
        return None if name is None else loaded[name].lora_id

    return [*map(id_of, names)] if isinstance(names, list) else id_of(names)


async def release(_count: Callable, _registry: Any, _lora_id: Any) -> None:
    """Around `LoRARegistry.release`: nothing was counted."""


async def wait_for_unload(forget: Callable, registry: Any, lora_id: str) -> None:
    """Around `LoRARegistry.wait_for_unload`: wait until no request uses the adapter."""
    while any(state.obj.lora_id == lora_id for state in registry.request_states.values()):
        await asyncio.sleep(POLL)
    await forget(registry, lora_id)


async def refuse_with_workers(change: Callable, manager: Any, obj: Any, *args: Any) -> Any:
    """Around calls that load or unload an adapter: refuse them with several tokenizer workers."""
    if manager.server_args.tokenizer_worker_num == 1:
        return await change(manager, obj, *args)
    reason = "with several tokenizer workers, adapters cannot be loaded or unloaded: name them in --lora-paths"
    return LoRAUpdateOutput(success=False, error_message=reason)


_REGISTRY = on("sglang.srt.lora.lora_registry.LoRARegistry")
HOOKS = (
    on("sglang.srt.managers.tokenizer_manager.TokenizerManager").repair(
        "init_lora",
        show_states,
        "AFTER",
        "uses of LoRA adapters are known from the requests",
        "SGLang counts down however a request ends",
    ),
    _REGISTRY.repair(
        "acquire",
        acquire,
        "AROUND",
        "uses of LoRA adapters are known from the requests",
        "SGLang counts down however a request ends",
    ),
    _REGISTRY.repair(
        "release",
        release,
        "AROUND",
        "uses of LoRA adapters are known from the requests",
        "SGLang counts down however a request ends",
    ),
    _REGISTRY.repair(
        "wait_for_unload",
        wait_for_unload,
        "AROUND",
        "unloading a LoRA adapter ends",
        "SGLang counts down however a request ends",
    ),
    *(
        on("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin").repair(
            change,
            refuse_with_workers,
            "AROUND",
            "no adapter is loaded for one of several tokenizer workers alone",
            "SGLang's workers share a registry",
        )
        for change in ("load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter")
    ),
)

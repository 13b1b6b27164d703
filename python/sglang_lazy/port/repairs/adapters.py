"""What must not end SGLang's scheduler: an adapter for which it finds no place in memory.

SGLang looks when the first request names the adapter. For the MLP of Nemotron-H, which has no gate, it finds none. Can
go once it looks when it loads the adapter.
"""

from typing import Any

from sglang.srt.lora.utils import get_normalized_target_modules, get_target_module_name

from sglang_lazy.port.hooks import Hooks

HOOKS = Hooks()


@HOOKS.on("sglang.srt.lora.lora_manager.LoRAManager").repair(
    ("load_lora_weights", "load_lora_weights_from_tensors"),
    "AFTER",
    "an adapter without a place in memory is refused",
    "SGLang looks for it when it loads an adapter",
)
def find_places(_result: Any, manager: Any, adapter: Any, *_weights: Any) -> None:
    """After `LoRAManager.load_lora_weights`.  adapter: its `LoRARef`.

    Raises ValueError for a weight without a place: the adapter is not loaded, and a server that starts with it ends.
    """
    config = manager.configs[adapter.lora_id]
    # At the start SGLang learns from all adapters what memory is for.
    places = {*getattr(manager, "target_modules", ()), *get_normalized_target_modules(config.target_modules)}
    if "all" in places:
        return
    try:
        for layer in manager.loras[adapter.lora_id].layers:
            for name in layer.weights:
                get_target_module_name(name, places)
    except ValueError as error:
        del manager.loras[adapter.lora_id], manager.configs[adapter.lora_id]
        raise ValueError(f"{error}: SGLang does not serve adapters of this module in this model") from None

"""LoRA adapters of Comb models: they change the decoder alone."""

from typing import Any

from sglang_lazy.comb.config import ARCHITECTURE, CROSS, ENCODER
from sglang_lazy.port.hooks import feature


def keep_to_the_decoder(_result: Any, manager: Any) -> None:
    """After `LoRAManager.init_lora_modules`, which selects modules by the end of their names: restore those of the
    encoder and the cross layers."""
    from sglang.srt.utils import replace_submodule

    for modules in manager.lora_modules:
        for name in [name for name in modules if name.startswith((CROSS, ENCODER))]:
            replace_submodule(manager.base_model, name, modules.pop(name).base_layer)


def check_weight(adapter: Any, name: str, *_args: Any) -> None:
    """Before `LoRAAdapter._process_weight`, which selects layers by their number: raise ValueError for a weight of the
    encoder or a cross layer."""
    is_comb = ARCHITECTURE in (adapter.base_hf_config.architectures or ())
    if is_comb and any(part in name for part in (".cross_layers.", ENCODER)):
        raise ValueError(f"adapters of a Comb model may change only its decoder; this one has {name!r}")


HOOKS = (
    feature(
        "sglang.srt.lora.lora_manager.LoRAManager.init_lora_modules",
        keep_to_the_decoder,
        "AFTER",
        "LoRA adapters of Comb models change the decoder alone",
    ),
    feature(
        "sglang.srt.lora.lora.LoRAAdapter._process_weight",
        check_weight,
        "BEFORE",
        "LoRA adapters that do not fit a Comb model are refused",
    ),
)

"""What a Comb model cannot be served with: some flags, and LoRA adapters of more than the decoder."""

from typing import Any

from sglang_lazy.comb.config import ARCHITECTURE, CROSS, ENCODER
from sglang_lazy.port.facts import flags_of
from sglang_lazy.port.hooks import on


def unfit_flags_of_comb(runner: Any) -> dict[str, bool]:
    """Reasons in the flags for a model that reads chunks through an encoder, each with whether it applies."""
    flags = flags_of(runner.server_args)
    return {
        "LoRA of embed_tokens or lm_head: the encoder reads the decoder's embedding, which may be its head, too": (
            bool(flags.enable_lora and {"embed_tokens", "lm_head"} & runner.lora_manager.target_modules)
        ),
        "--enable-torch-compile: it would compile layers without the cross layers before them": (
            flags.enable_torch_compile
        ),
    }


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
    on("sglang.srt.lora.lora_manager.LoRAManager").feature(
        "init_lora_modules", keep_to_the_decoder, "AFTER", "LoRA adapters of Comb models change the decoder alone"
    ),
    on("sglang.srt.lora.lora.LoRAAdapter").feature(
        "_process_weight", check_weight, "BEFORE", "LoRA adapters that do not fit a Comb model are refused"
    ),
)

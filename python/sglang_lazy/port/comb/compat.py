"""What a server of a Comb model cannot be started with."""

from typing import Any

from sglang_lazy.port.facts import flags_of


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

"""Workarounds for SGLang on a CPU: default backends, and LoRA without pinned memory."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import declare_resolution
from torch.overrides import TorchFunctionMode

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.facts import flags_of
from sglang_lazy.port.hooks import repair

logger = logging.getLogger(__name__)

CPU_SETTINGS = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "llguidance"}


def backends_for_cpu(flags: Any) -> dict[str, str]:
    """On a CPU, the backends that are not set among a server's flags, and ones that work there.

    SGLang's default attention backend needs kernels that only some CPUs have; its LoRA and grammar backends need a GPU.
    """
    if flags.device != "cpu":
        return {}
    chosen = {name: value for name, value in CPU_SETTINGS.items() if getattr(flags, name) is None}
    if (flags.enable_lora or flags.lora_paths) and flags.lora_backend == "csgmv":  # SGLang's default
        chosen["lora_backend"] = "torch_native"
    if chosen:
        named = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in chosen.items())
        logger.warning("sglang-lazy: on a CPU, these flags were not set and are now %s", named)
    return chosen


def unfit_for_cpu(args: Any) -> str | None:
    """Why a server with these flags would end on a CPU, or None."""
    if args.device == "cpu" and args.grammar_backend == "xgrammar":
        return "--grammar-backend xgrammar masks tokens on a GPU: on a CPU, leave it out or use llguidance or outlines"
    return None


def replace_triton(args: Any, resolve: Callable[[Any], None]) -> None:
    """Around SGLang's resolution of the attention backend, after its check that the model supports it: on a CPU,
    replace triton by torch_native. For Gemma 4, SGLang accepts only GPU backends.

    Not with the fallback: SGLang's own attention may then have to serve the model, and the check is right.
    """
    flags = flags_of(args)
    if flags.device == "cpu" and flags.attention_backend == "triton" and not LazyConfig.current().fallback:
        logger.warning("sglang-lazy: on a CPU, --attention-backend triton is replaced by torch_native")
        declare_resolution(args, "sglang_lazy", attention_backend="torch_native")
    resolve(args)


class Unpinned(TorchFunctionMode):
    """A mode in which requests to pin memory are ignored, since pinning needs a GPU driver."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def without_pinning(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around methods of SGLang's `LoRAManager` that pin memory."""
    if torch.cuda.is_available():
        return original(*args, **kwargs)
    with Unpinned():
        return original(*args, **kwargs)


_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
HOOKS = (
    *(
        repair(
            f"{_LORA}.{method}",
            without_pinning,
            "AROUND",
            "LoRA on a CPU, where memory cannot be pinned",
            "SGLang's LoRA pins memory only beside a GPU",
        )
        for method in ("__init__", "prepare_lora_batch")
    ),
)

"""Workarounds for SGLang on a CPU: default backends, and LoRA without pinned memory."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.hooks import repair

logger = logging.getLogger(__name__)

CPU_SETTINGS = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "llguidance"}


def choose_backends(args: Any) -> None:
    """On a CPU, set the backends of `ServerArgs` that are not set, and not resolved yet, to ones that work.

    SGLang's default attention backend needs kernels that only some CPUs have; its LoRA and grammar backends need a GPU.
    """
    if args.device != "cpu":
        return
    unset = {name: value for name, value in CPU_SETTINGS.items() if getattr(args, name) is None}
    if (args.enable_lora or args.lora_paths) and args.lora_backend == "csgmv":  # SGLang's default
        unset["lora_backend"] = "torch_native"
    for name, value in unset.items():
        setattr(args, name, value)
    if unset:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in unset.items())
        logger.warning("sglang-lazy: on a CPU, these flags were not set and are now %s", flags)


def unfit_for_cpu(args: Any) -> str | None:
    """Why a server with these flags would end on a CPU, or None."""
    if args.device == "cpu" and args.grammar_backend == "xgrammar":
        return "--grammar-backend xgrammar masks tokens on a GPU: on a CPU, leave it out or use llguidance or outlines"
    return None


def replace_triton(args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `ServerArgs._handle_attention_backend_compatibility`, which runs after SGLang has checked that the model
    supports the backend: on a CPU, replace triton by torch_native. For Gemma 4, SGLang accepts only GPU backends.

    Not with the fallback: SGLang's own attention may then have to serve the model, and the check is right.
    """
    if args.device == "cpu" and args.attention_backend == "triton" and not LazyConfig.current().fallback:
        logger.warning("sglang-lazy: on a CPU, --attention-backend triton is replaced by torch_native")
        args.attention_backend = "torch_native"


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

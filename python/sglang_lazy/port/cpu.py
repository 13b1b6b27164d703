"""Workarounds for SGLang on a CPU: default backends, the size of the KV pool, and LoRA without pinned memory."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import declare_resolution
from sglang.srt.mem_cache.pool_host.base import ranks_per_host
from torch.overrides import TorchFunctionMode

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.facts import flags_of
from sglang_lazy.port.hooks import Hooks

logger = logging.getLogger(__name__)

CPU_SETTINGS = {"attention_backend": "torch_native", "sampling_backend": "pytorch", "grammar_backend": "llguidance"}
POOL_SHARE = 0.25
"""The KV pool's share of the memory that is free before the model is loaded, on a CPU, unless flags size the pool."""
HOOKS = Hooks()


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


def has_draft_kernels(device: str) -> bool:
    """Whether SGLang has kernels that draft and verify: its wheels have them for GPUs alone."""
    return device != "cpu"


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


@HOOKS.on("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator").feature(
    "_profile_available_bytes", "AROUND", "a KV pool that leaves memory to others on a CPU"
)
def bounded_pool(profile: Callable, configurator: Any, free_before: float) -> int:
    """On a CPU, whose memory is everybody's, a share of it.

    SGLang would take nearly all, as it may of a GPU's. Not if --mem-fraction-static or --max-total-tokens is given.
    free_before: GiB that were free before the model was loaded, the least among the ranks. Returns bytes.
    """
    num_bytes, args = profile(configurator, free_before), configurator.server_args
    if configurator.device != "cpu" or args.mem_fraction_static is not None or args.max_total_tokens is not None:
        return num_bytes
    bound = int(free_before * POOL_SHARE / ranks_per_host() * 2**30)
    if bound < num_bytes:
        logger.warning(
            "sglang-lazy: on a CPU, the KV pool is %.1f GiB, %.0f%% of the memory that was free; "
            "--max-total-tokens or --mem-fraction-static sizes it otherwise",
            bound / 2**30,
            100 * POOL_SHARE / ranks_per_host(),
        )
    return min(num_bytes, bound)


class Unpinned(TorchFunctionMode):
    """A mode in which requests to pin memory are ignored, since pinning needs a GPU driver."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


@HOOKS.on("sglang.srt.lora.lora_manager.LoRAManager").repair(
    ("__init__", "prepare_lora_batch"),
    "AROUND",
    "LoRA on a CPU, where memory cannot be pinned",
    "SGLang's LoRA pins memory only beside a GPU",
)
def without_pinning(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around methods of SGLang's `LoRAManager` that pin memory."""
    if torch.cuda.is_available():
        return original(*args, **kwargs)
    with Unpinned():
        return original(*args, **kwargs)

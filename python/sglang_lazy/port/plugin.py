"""Every touch on SGLang, registered in one place.

SGLang calls `load` in each of its processes (entry point `sglang.srt.plugins`). Nothing happens unless the plugin was
asked for: `activate` publishes the configuration, and the processes that SGLang spawns inherit it.
"""

import importlib.metadata
import pkgutil
import sys
import types
from typing import NamedTuple

from sglang_lazy.core.config import LazyConfig

SGLANG_VERSION = "0.5.17"
CACHE_BACKEND = "lazy"


class Hook(NamedTuple):
    """`function` ("module:name", imported when applied) hooks `target`, in SGLang's sense of `kind`."""

    target: str
    function: str
    kind: str


_PORT = "sglang_lazy.port"
_OPENAI = "sglang.srt.entrypoints.openai"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
SURFACE_HOOKS = tuple(
    Hook(*row)
    for row in (
        ("sglang.srt.server_args.ServerArgs.__post_init__", f"{_PORT}.cpu:choose_backends", "BEFORE"),
        ("sglang.srt.entrypoints.http_server.set_global_state", f"{_PORT}.http:install_routes", "AFTER"),
        (f"{_TOKENIZER_MANAGER}._validate_one_request", f"{_PORT}.tokenizer_manager:prepare_request", "BEFORE"),
        (f"{_TOKENIZER_MANAGER}._wait_one_response", f"{_PORT}.tokenizer_manager:report_chunks", "AROUND"),
        ("sglang.srt.entrypoints.http_server.set_global_state", f"{_PORT}.shadow:attach", "AFTER"),
        (f"{_TOKENIZER_MANAGER}._validate_one_request", f"{_PORT}.shadow:give_way", "BEFORE"),
        (f"{_TOKENIZER_MANAGER}.abort_request", f"{_PORT}.shadow:abort_with_all", "BEFORE"),
        *(
            (f"{_TOKENIZER_MANAGER}.{control}", f"{_PORT}.shadow:make_idle", "AROUND")
            for control in (
                "flush_cache",
                "release_memory_occupation",
                "update_weights_from_disk",
                "update_weights_from_distributed",
                "update_weights_from_tensor",
                "update_weights_from_ipc",
            )
        ),
        (
            f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request",
            f"{_PORT}.chat:convert_request",
            "AROUND",
        ),
        (
            f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
            f"{_PORT}.completions:convert_request",
            "AROUND",
        ),
        (f"{_OPENAI}.usage_processor.UsageProcessor._details_if_cached", f"{_PORT}.protocol:usage_details", "AFTER"),
        (f"{_OPENAI}.utils.cached_tokens_details_from_dict", f"{_PORT}.protocol:cached_tokens_details", "AFTER"),
    )
)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNERS = "sglang.srt.model_executor.runner"
_DECODE_GRAPHS = f"{_RUNNERS}.decode_cuda_graph_runner.DecodeCudaGraphRunner"
ENGINE_HOOKS = tuple(
    Hook(*row)
    for row in (
        ("sglang.srt.server_args.ServerArgs.__post_init__", "sglang_lazy.port.plugin:choose_cache", "BEFORE"),
        (f"{_SCHEDULER}.__init__", "sglang_lazy.port.scheduler:attach_admission", "AFTER"),
        (f"{_SCHEDULER}._add_request_to_queue", "sglang_lazy.port.scheduler:add_request_to_queue", "AROUND"),
        (f"{_SCHEDULER}.get_next_batch_to_run", "sglang_lazy.port.scheduler:get_next_batch_to_run", "AROUND"),
        (f"{_SCHEDULER}._get_new_batch_prefill_raw", "sglang_lazy.port.scheduler:get_new_batch_prefill_raw", "AROUND"),
        (f"{_SCHEDULER}.on_idle", "sglang_lazy.port.scheduler:on_idle", "AFTER"),
        (
            "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
            "sglang_lazy.port.scheduler:prepare_for_extend",
            "AFTER",
        ),
        (
            "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.__init__",
            "sglang_lazy.port.scheduler:report_reuse",
            "BEFORE",
        ),
        (
            "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation",
            "sglang_lazy.port.model_runner:forward_batch_generation",
            "AROUND",
        ),
        (
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
            "sglang_lazy.port.model_runner:init_new",
            "AFTER",
        ),
        (f"{_DECODE_GRAPHS}.capture_one_shape", "sglang_lazy.port.model_runner:capture_one_shape", "AROUND"),
        (f"{_DECODE_GRAPHS}._resolve_lora_variant", "sglang_lazy.port.model_runner:resolve_variant", "AROUND"),
        (
            f"{_RUNNERS}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph",
            "sglang_lazy.port.model_runner:can_run_prefill_graph",
            "AROUND",
        ),
    )
)
HOOKS = ENGINE_HOOKS + SURFACE_HOOKS

_installed = False


def activate(config: LazyConfig) -> None:
    """Ask for the plugin in this process and in every process it spawns."""
    config.to_env()
    install()


def load() -> None:
    """Entry point that SGLang calls in each of its processes."""
    if LazyConfig.from_env() is not None:
        install()


def install() -> None:
    """Register the cache, wrap the attention backends and apply every hook in this process; once.

    Raises RuntimeError for another SGLang version, or if a hook did not take.
    """
    global _installed
    if _installed:
        return
    check_version()
    _provide_rotary_import()

    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_lazy.port import compat
    from sglang_lazy.port.model_runner import wrap_backend

    for name in compat.ATTENTION_BACKENDS:
        ATTENTION_BACKENDS[name] = wrap_backend(ATTENTION_BACKENDS[name])
    register_radix_cache_backend(CACHE_BACKEND, create_cache)
    for hook in HOOKS:
        HookRegistry.register(hook.target, pkgutil.resolve_name(hook.function), HookType[hook.kind])
    HookRegistry.apply_hooks()
    _installed = True
    verify()


def check_version() -> None:
    """Raise RuntimeError unless the SGLang installed is the one whose internals are hooked."""
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION:
        raise RuntimeError(f"sglang-lazy needs sglang {SGLANG_VERSION}, but sglang {installed} is installed")


def verify() -> None:
    """Raise RuntimeError naming every hook that is not in place; SGLang itself only logs such failures."""
    missing = [hook.target for hook in HOOKS if not _in_place(hook)]
    if not _installed or missing:
        raise RuntimeError(f"sglang-lazy is not in place in this process; missing hooks: {missing or 'all'}")


def _in_place(hook: Hook) -> bool:
    function = pkgutil.resolve_name(hook.function)
    wrapper = pkgutil.resolve_name(hook.target)
    wrapper = getattr(wrapper, "__func__", wrapper)
    while wrapper is not None:
        if any(cell.cell_contents is function for cell in getattr(wrapper, "__closure__", None) or ()):
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False


def _provide_rotary_import() -> None:
    """Off CUDA, SGLang's rotary embedding imports a vLLM kernel that its forward pass then never calls."""
    from sglang.srt.utils import is_cuda

    if not is_cuda() and "vllm._custom_ops" not in sys.modules:
        stand_in = types.ModuleType("vllm._custom_ops")
        stand_in.rotary_embedding = None
        sys.modules["vllm._custom_ops"] = stand_in


def choose_cache(args, *_args, **_kwargs) -> None:
    """Before `ServerArgs.__post_init__`: our cache is the default one."""
    if args.radix_cache_backend is None:
        args.radix_cache_backend = CACHE_BACKEND


def create_cache(context):
    """Radix-cache factory; where chunk reuse does not fit and the user agreed, the stock cache."""
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    from sglang_lazy.attention.table import table_of
    from sglang_lazy.port.radix import LazyRadixCache

    verify()
    if table_of(context.tp_worker.model_runner.req_to_token_pool) is not None:
        return LazyRadixCache(context.params)
    if LazyConfig.from_env().fallback:
        return default_radix_cache_factory(context)
    raise RuntimeError("sglang-lazy: the attention backend has no link path; was it created before the plugin was?")

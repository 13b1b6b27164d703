"""Install the plugin in SGLang's processes.

SGLang calls `load` in each of its processes (entry point `sglang.srt.plugins`). It does nothing unless the plugin is
active: `activate` publishes the configuration in the environment, which the processes that SGLang spawns inherit.
"""

import importlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable
from typing import Any

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.hooks import Hook, apply, missing

SGLANG_VERSION = "0.5.23"
ANY_SGLANG = "SGLANG_LAZY_ANY_SGLANG"
CACHE_BACKEND = "lazy"

WITH_HOOKS = (
    *("cpu", "repairs.http", "repairs.scheduler", "repairs.processes"),
    *("scheduler.control", "scheduler.steps", "scheduler.schedule_policy"),
    *("comb.pool", "model.model_runner", "model.recurrent", "graphs", "model.drafts"),
    *("serving.http", "serving.scopes", "serving.malformed", "serving.tokenizer_manager"),
    *("serving.chat", "serving.completions", "serving.responses", "serving.messages", "serving.usage"),
    "scheduler.upkeep",
)
"""The modules of `port` with hooks: of two hooks with one target, the later wraps the earlier."""

_hooks: tuple[Hook, ...] = ()
"""All hooks, once they are installed."""


def activate(config: LazyConfig) -> None:
    """Activate the plugin in this process and in all processes that it spawns."""
    config.to_env()
    install()

    from sglang_lazy.port.repairs.processes import start_resource_tracker

    start_resource_tracker()


def load() -> None:
    """Install the plugin if it is active; SGLang calls this entry point in each of its processes."""
    if LazyConfig.from_env() is not None:
        install()


def install() -> None:
    """Register the cache, wrap the attention backends and apply all hooks in this process, once.

    Raises RuntimeError for another SGLang version, or if a hook could not be applied.
    """
    global _hooks
    if _hooks:
        return
    check_version()
    provide_rotary_import()

    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    from sglang_lazy.comb import config as comb_config
    from sglang_lazy.core import supported
    from sglang_lazy.port import cpu
    from sglang_lazy.port.model import model_runner

    for name in supported.ATTENTION_BACKENDS:
        ATTENTION_BACKENDS[name] = model_runner.wrap_backend(ATTENTION_BACKENDS[name])
    register_radix_cache_backend(CACHE_BACKEND, create_cache)
    register_resolution_hook("handle_deprecated_dp_attention")(choose_flags)  # the first step
    register_resolution_hook("handle_attention_backend_compatibility")(cpu.replace_triton)
    comb_config.register()
    _hooks = declared()
    apply(_hooks)
    verify()


def declared() -> tuple[Hook, ...]:
    """All hooks, in the order in which they are applied."""
    modules = (importlib.import_module(f"sglang_lazy.port.{name}") for name in WITH_HOOKS)
    return tuple(hook for module in modules for hook in module.HOOKS)


def check_version() -> None:
    """Raise RuntimeError unless the installed SGLang is the version that the hooks were written for.

    ANY_SGLANG in the environment allows any version: to see what breaks with a new one, never to serve.
    """
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG_VERSION and ANY_SGLANG not in os.environ:
        raise RuntimeError(f"sglang-lazy needs sglang {SGLANG_VERSION}, but sglang {installed} is installed")


def verify() -> None:
    """Raise RuntimeError naming every hook that is not in place, repairs aside."""
    if lost := missing(_hooks):
        raise RuntimeError(f"sglang-lazy is not in place in this process; missing hooks: {lost}")
    if not _hooks:
        raise RuntimeError("sglang-lazy is not in place in this process: no hooks are installed")


def provide_rotary_import() -> None:
    """Provide the vLLM kernel that SGLang's rotary embedding imports without CUDA, but never calls."""
    from sglang.srt.utils import is_cuda

    if not is_cuda() and "vllm._custom_ops" not in sys.modules:
        stand_in = types.ModuleType("vllm._custom_ops")
        vars(stand_in).update(rotary_embedding=None)
        sys.modules["vllm._custom_ops"] = stand_in


def choose_flags(args: Any, resolve: Callable[[Any], None]) -> None:
    """Around the first step in which SGLang resolves `ServerArgs`: make ours the default cache, add the self-test to
    SGLang's warm-ups, and on a CPU choose backends that work there."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_lazy.port.cpu import backends_for_cpu
    from sglang_lazy.port.facts import flags_of
    from sglang_lazy.port.serving import selftest

    flags = flags_of(args)
    chosen = {"warmups": ",".join(filter(None, (flags.warmups, selftest.NAME))), **backends_for_cpu(flags)}
    if flags.radix_cache_backend is None:
        chosen["radix_cache_backend"] = CACHE_BACKEND
    declare_resolution(args, "sglang_lazy", **chosen)
    resolve(args)


def create_cache(context: Any) -> Any:
    """Radix-cache factory: ours, or with --lazy-fallback SGLang's own if chunks cannot be reused here."""
    from sglang.srt.mem_cache.registry import default_radix_cache_factory

    from sglang_lazy.attention.table import table_of
    from sglang_lazy.port.cache.create import new_cache

    verify()
    runner = context.tp_worker.model_runner
    if table_of(runner.req_to_token_pool) is not None:
        return new_cache(context, runner)
    if LazyConfig.current().fallback:
        return default_radix_cache_factory(context)
    raise RuntimeError("sglang-lazy: the attention backend was created before the plugin was installed")

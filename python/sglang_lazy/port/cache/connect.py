"""Connect the storage backend that SGLang's flags name."""

import types
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_memory, get_observability, get_parallel, get_serving

from sglang_lazy.cache.host import HostKV
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.port.cache.backends import AddressBackend, FileBackend, TensorBackend
from sglang_lazy.port.cache.chunk_objects import ChunkObjects
from sglang_lazy.port.cache.storage import ChunkStorage, Patience
from sglang_lazy.port.cache.tier_report import StorageReport, measured
from sglang_lazy.port.model.identity import identity_of

MAX_WAIT = 30.0
"""Seconds: the default of `prefetch_timeout_max`."""


def connect_storage(
    store: ChunkStore, host: HostKV, agree: Callable[[list[int]], list[int]], runner: Any, has_metrics: bool
) -> ChunkStorage:
    """The storage below `host`, which the caller has tell it of copies.

    agree: see `ChunkStorage`.  runner: the `ModelRunner`.
    Raises ValueError if the backend's own configuration is wrong, and whatever the backend raises.
    """
    name, ranks, token_bytes = get_memory().hicache_storage_backend, _ranks(), host.memory.token_bytes
    patience, extra = _extra_config()
    report = StorageReport(token_bytes)
    if has_metrics:
        labels = {"storage_backend": name, **ranks, **(get_observability().extra_metric_labels or {})}
        report = measured(token_bytes, labels)
    objects = ChunkObjects(_backend(name, ranks, extra), host.memory)
    return ChunkStorage(store, host, objects, lambda adapter: identity_of(runner, adapter), agree, report, patience)


def _ranks() -> dict[str, int]:
    """This process, as SGLang labels what it measures of storage."""
    parallel = get_parallel()
    return {
        "tp_rank": parallel.attn_tp_rank,
        "dp_rank": parallel.attn_dp_rank,
        "pp_rank": parallel.pp_rank,
        "pp_size": parallel.pp_size,
        "attn_cp_rank": parallel.attn_cp_rank,
        "attn_cp_size": parallel.attn_cp_size,
    }


def _extra_config() -> tuple[Patience, dict[str, Any]]:
    """What `--hicache-storage-backend-extra-config` says of waiting, and the rest, for the backend. SGLang has no
    `prefetch_timeout_max`."""
    flags, parse = get_memory(), HybridCacheController.parse_storage_backend_extra_config
    extra, _, base, per_ki_token, _ = parse(flags.hicache_storage_backend_extra_config)
    longest = extra.pop("prefetch_timeout_max", MAX_WAIT)
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ValueError(f"prefetch_timeout_max must be a number, got {longest!r}")
    if folder := get_serving().file_storage_path:
        extra.setdefault("file_storage_path", folder)
    return Patience(flags.hicache_storage_prefetch_policy, base, per_ki_token, float(longest)), extra


def _backend(name: str, ranks: dict[str, int], extra: dict[str, Any]) -> TensorBackend:
    """SGLang's backend. It is given objects, whatever they hold, and knows nothing of the host's memory: a Mooncake
    that would put that memory into its own server's (`standalone_storage`) refuses to start."""
    config = HiCacheStorageConfig(
        **ranks,
        tp_size=get_parallel().attn_tp_size,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="sglang-lazy",  # identities tell models apart, whatever folder they are served from
        extra_config=extra,
    )
    backend = StorageBackendFactory.create_backend(name, config, types.SimpleNamespace(allocator=None))
    if name == "mooncake":
        return AddressBackend(backend)
    return (FileBackend if isinstance(backend, HiCacheFile) else TensorBackend)(backend)

"""Connect the storage backend that SGLang's flags name."""

import types
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_lazy.cache.host import HostKV
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.port.cache.backends import AddressBackend, FileBackend, TensorBackend
from sglang_lazy.port.cache.tier_metrics import measured_storage
from sglang_lazy.port.facts import dp_rank, flags_of, tp_rank, tp_size
from sglang_lazy.port.model.identity import identity_of
from sglang_lazy.recurrent.pool import StateLayout
from sglang_lazy.storage.chunk_objects import ChunkObjects
from sglang_lazy.storage.chunk_storage import ChunkStorage, Patience
from sglang_lazy.storage.report import StorageReport

MAX_WAIT = 30.0
"""Seconds: the default of `prefetch_timeout_max`."""


def connect_storage(
    store: ChunkStore,
    host: HostKV,
    agree: Callable[[list[int]], list[int]],
    runners: Sequence[Any],
    has_metrics: bool,
    states: StateLayout | None = None,
) -> ChunkStorage:
    """The storage below `host`, which the caller has tell it of copies.

    agree: see `ChunkStorage`.  runners: the `ModelRunner`, and that of a draft.  states: of recurrent layers, if any.
    Raises ValueError if the backend's own configuration is wrong, and whatever the backend raises.
    """
    flags, state_memory = flags_of(runners[0].server_args), None if host.states is None else host.states.memory
    patience, extra = _extra_config(flags)
    sizes = host.memory.token_bytes, 0 if state_memory is None else state_memory.token_bytes
    report = StorageReport(*sizes)
    if has_metrics:
        labels = {"storage_backend": flags.hicache_storage_backend, **_ranks(), **(flags.extra_metric_labels or {})}
        report = measured_storage(*sizes, labels)
    backend = _backend(flags.hicache_storage_backend, extra)
    objects = ChunkObjects(backend, host.memory, state_memory)

    def identity(adapter: str | None) -> bytes | None:
        return identity_of(runners, adapter, states)

    return ChunkStorage(store, host, objects, identity, agree, report, patience)


def _ranks() -> dict[str, int]:
    """This process, as SGLang labels what it measures of storage."""
    no_others = {"pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}  # servers with others are refused
    return {"tp_rank": tp_rank(), "dp_rank": dp_rank(), **no_others}


def _extra_config(flags: Any) -> tuple[Patience, dict[str, Any]]:
    """What `--hicache-storage-backend-extra-config` says of waiting, and the rest, for the backend. SGLang has no
    `prefetch_timeout_max`."""
    parse = HybridCacheController.parse_storage_backend_extra_config
    extra, _, base, per_ki_token, _ = parse(flags.hicache_storage_backend_extra_config)
    longest = extra.pop("prefetch_timeout_max", MAX_WAIT)
    if isinstance(longest, bool) or not isinstance(longest, int | float):
        raise ValueError(f"prefetch_timeout_max must be a number, got {longest!r}")
    if flags.file_storage_path:
        extra.setdefault("file_storage_path", flags.file_storage_path)
    return Patience(flags.hicache_storage_prefetch_policy, base, per_ki_token, float(longest)), extra


def _backend(name: str, extra: dict[str, Any]) -> TensorBackend:
    """SGLang's backend. It is given objects, whatever they hold, and knows nothing of the host's memory: a Mooncake
    that would put that memory into its own server's (`standalone_storage`) refuses to start."""
    config = HiCacheStorageConfig(
        **_ranks(),
        tp_size=tp_size(),
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

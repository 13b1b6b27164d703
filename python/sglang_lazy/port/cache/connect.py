"""Connect a cache to the storage backend that SGLang's flags name."""

from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_lazy.port.cache.backends import AddressBackend, FileBackend, TensorBackend
from sglang_lazy.port.cache.storage import StoredHiRadixCache
from sglang_lazy.port.cache.tier_report import StorageReport, measured
from sglang_lazy.port.model.identity import identity_of


def connect_storage(cache: StoredHiRadixCache, args: Any, runner: Any, has_metrics: bool) -> None:
    """cache: created without storage."""
    name, pool = args.hicache_storage_backend, cache.token_to_kv_pool_host
    extra_config = cache._parse_storage_backend_extra_config(args.hicache_storage_backend_extra_config)[0]
    # In place of the model's name: identities tell models apart, whatever folder they are served from.
    config = cache.cache_controller._generate_storage_config("sglang-lazy", extra_config)
    backend = StorageBackendFactory.create_backend(name, config, pool)
    if name == "mooncake":
        objects: TensorBackend = AddressBackend(backend)
    else:
        backend.register_mem_pool_host(pool)
        objects = (FileBackend if isinstance(backend, HiCacheFile) else TensorBackend)(backend)
    report = StorageReport(pool.get_size_per_token())
    if has_metrics:
        ranks = ("tp_rank", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
        labels = {"storage_backend": name, "dp_rank": cache.cache_controller.dp_rank}
        labels |= {rank: getattr(config, rank) for rank in ranks} | (args.extra_metric_labels or {})
        report = measured(pool.get_size_per_token(), labels, args)
    cache.connect(objects, lambda adapter: identity_of(runner, adapter), report)

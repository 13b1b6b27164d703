"""Reports of the host tier and storage that are on /metrics as well, with SGLang's own."""

from collections.abc import Mapping
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_STORAGE,
    RadixCacheMetricsCollector,
    StorageMetrics,
    StorageMetricsCollector,
    resolve_collector_class,
)

from sglang_lazy.storage.report import COUNTERS, HOST_COUNTERS, WAITS, HostReport, StorageReport, counters_of


def measured_host(collector: RadixCacheMetricsCollector) -> HostReport:
    """A report of the host tier, with the labels of SGLang's collector of its cache's metrics."""

    def count_loaded(num_tokens: int) -> None:
        collector.increment_load_back_num_tokens(num_tokens, pool=PoolName.KV.value)

    return HostReport(count_loaded, counters_of("host", HOST_COUNTERS, collector.labels))


def measured_storage(token_size: int, state_size: int, labels: Mapping[str, Any]) -> StorageReport:
    """A report of storage, with these labels.  token_size, state_size: bytes."""
    from prometheus_client import Histogram  # not before SGLang has set up its directory of metrics

    collector = resolve_collector_class(STAT_LOGGER_ROLE_STORAGE, StorageMetricsCollector)(labels=dict(labels))

    def log_stored(num_tokens: int, speed: float) -> None:
        collector.log_backuped_tokens(num_tokens)
        collector.log_storage_metrics(StorageMetrics(backup_pgs=[num_tokens], backup_bandwidth=[speed]))

    def log_fetched(num_tokens: int, speed: float) -> None:
        collector.log_prefetched_tokens(num_tokens)
        collector.log_storage_metrics(StorageMetrics(prefetch_pgs=[num_tokens], prefetch_bandwidth=[speed]))

    text = "seconds from asking storage for a chunk to its answer"
    waits = Histogram("sglang_lazy:storage_fetch_seconds", text, list(labels), buckets=WAITS).labels(**labels)
    counters = counters_of("storage", COUNTERS, labels)
    return StorageReport(token_size, state_size, log_stored, log_fetched, counters, waits.observe)

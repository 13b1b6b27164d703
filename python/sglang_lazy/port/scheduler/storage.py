"""Hooks on the scheduler's messages about storage. Its routes do what they say, or answer why not."""

from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

from sglang_lazy.port.hooks import feature
from sglang_lazy.port.repairs.operators import OperationError
from sglang_lazy.port.scheduler.steps import admission_of
from sglang_lazy.storage.chunk_storage import ChunkStorage


def clear_storage(_original: Callable, scheduler: Any, _message: Any) -> ClearHiCacheReqOutput:
    """Around `Scheduler.clear_hicache_storage_wrapped`, which reports success whatever happens.

    Raises OperationError if there is nothing to clear, or it fails.
    """
    if not scheduler.enable_hicache_storage:
        raise OperationError("there is no storage: servers have one with --hicache-storage-backend")
    if not scheduler.tree_cache.clear_storage_backend():
        raise OperationError("the storage backend has not deleted everything, or cannot; the log may say why")
    return ClearHiCacheReqOutput(success=True)


def identify(flushed: bool, scheduler: Any, *_args: Any, **_kwargs: Any) -> bool:
    """After `Scheduler.flush_cache`: hash the model again, so that the next request need not wait for it. Not while its
    weights have left the memory."""
    storage, offloaded = _storage_of(scheduler), scheduler.weight_updater.offload_tags
    if flushed and storage is not None and GPU_MEMORY_TYPE_WEIGHTS not in offloaded:
        storage.identify()
    return flushed


def update_weights(result: Any, updater: Any, message: Any) -> Any:
    """After updates by `SchedulerWeightUpdaterManager`: without a flush, what is cached is not of these weights, and
    what they compute must not be stored under the name of those before."""
    storage = _storage_of(updater.scheduler)
    if result is not None and not message.flush_cache and storage is not None:  # None: it is postponed
        storage.mix_weights()
    return result


def _storage_of(scheduler: Any) -> ChunkStorage | None:
    if admission_of(scheduler) is None or scheduler.tree_cache.tiers is None:
        return None
    return scheduler.tree_cache.tiers.storage


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
HOOKS = (
    feature(f"{_SCHEDULER}.clear_hicache_storage_wrapped", clear_storage, "AROUND", "storage is cleared, or not"),
    feature(f"{_SCHEDULER}.flush_cache", identify, "AFTER", "storage knows the model after a flush"),
    *(
        feature(f"{_UPDATER}.update_weights_from_{source}", update_weights, "AFTER", "storage keeps weights apart")
        for source in ("disk", "distributed", "ipc", "tensor")
    ),
)

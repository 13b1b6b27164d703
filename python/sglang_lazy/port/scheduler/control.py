"""Messages from SGLang's HTTP process to its schedulers: ours about chunks, and what SGLang's own do to chunks.

SGLang delivers each to all ranks of a scheduler in the same step; the first rank answers. Routes of storage do what
they say, or answer why not.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import (
    BaseReq,
    ClearHiCacheReqOutput,
    PickleWrapper,
    hook_custom_types,
    unwrap_from_pickle,
    wrap_as_pickle,
)
from sglang.utils import TypeBasedDispatcher

from sglang_lazy.port.facts import UPDATES, admission_of, dp_rank
from sglang_lazy.port.hooks import Hooks, unused
from sglang_lazy.port.repairs.scheduler import OperationError, postpone, requests_with_rows
from sglang_lazy.storage.chunk_storage import ChunkStorage

UNUSED_HOOKS = "unused hooks"
"""The verb that asks for the required hooks that have not run, as `unused`."""
HOOKS = Hooks()
_SCHEDULER = HOOKS.on("sglang.srt.managers.scheduler.Scheduler")


# mypy does not know that msgspec structs take class arguments.
class ChunksReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """verb: the action of `ChunkControl`, or UNUSED_HOOKS.  arguments: its keyword arguments.

    now: seconds since the epoch.
    """

    verb: str
    arguments: PickleWrapper | dict[str, Any]
    now: float


class ChunksReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """answer: None if the scheduler serves without chunk reuse.  dp_rank: of the scheduler."""

    answer: PickleWrapper | dict[str, Any] | None
    dp_rank: int


# In every process: with several tokenizer workers, the process that started them forwards messages.
hook_custom_types(ChunksReqInput, ChunksReqOutput)


@_SCHEDULER.required("init_request_dispatcher", "AFTER", "scheduler", "schedulers answer messages about chunks")
def init_request_dispatcher(_result: Any, scheduler: Any) -> None:
    """Handle our messages."""

    def handle(message: ChunksReqInput) -> ChunksReqOutput:
        admission = admission_of(scheduler)
        rank = dp_rank()
        if admission is None:
            return ChunksReqOutput(answer=None, dp_rank=rank)
        if message.verb == UNUSED_HOOKS:
            answer = {"unused": unused("scheduler")}
        else:
            answer = admission.control.handle(message.verb, unwrap_from_pickle(message.arguments), message.now)
        return ChunksReqOutput(answer=wrap_as_pickle(answer), dp_rank=rank)

    scheduler._request_dispatcher += TypeBasedDispatcher([(ChunksReqInput, handle)])


@_SCHEDULER.feature(
    "flush_cache", "AROUND", "aborted requests release chunks before a flush, and storage knows the model after it"
)
def flush_cache(original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Aborted requests, and those that wait in a paused scheduler, first release their chunks. Afterwards storage
    hashes the model again, so that the next request need not wait for it; not while its weights have left the
    memory."""
    admission = admission_of(scheduler)
    if admission is not None and scheduler.is_fully_idle():
        admission.let_go()
    flushed = original(scheduler, *args, **kwargs)
    storage = _storage_of(scheduler)
    if flushed and storage is not None and GPU_MEMORY_TYPE_WEIGHTS not in scheduler.weight_updater.offload_tags:
        storage.identify()
    return flushed


@_SCHEDULER.feature("clear_hicache_storage_wrapped", "AROUND", "storage is cleared, or not")
def clear_storage(_original: Callable, scheduler: Any, _message: Any) -> ClearHiCacheReqOutput:
    """Around `Scheduler.clear_hicache_storage_wrapped`, which reports success whatever happens.

    Raises OperationError if there is nothing to clear, or it fails.
    """
    if not scheduler.enable_hicache_storage:
        raise OperationError("there is no storage: servers have one with --hicache-storage-backend")
    if not scheduler.tree_cache.clear_storage_backend():
        raise OperationError("the storage backend has not deleted everything, or cannot; the log may say why")
    return ClearHiCacheReqOutput(success=True)


@HOOKS.on("sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager").feature(
    UPDATES, "AFTER", "storage keeps weights apart"
)
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


@_SCHEDULER.feature("unload_lora_adapter", "AROUND", "an unloaded adapter's chunks are forgotten")
def unload_adapter(unload: Callable, scheduler: Any, message: Any) -> Any:
    """Once nothing uses the adapter, forget its chunks, since it gets a new id if loaded again, and unload it. Until
    then, returns None.

    Clients have their answers or have left, but an aborted request ends with the next step, as does a fill that one of
    them has started.
    """
    admission, adapter = admission_of(scheduler), message.lora_id
    waiting = (*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue)
    if any(req.lora_id == adapter and not req.finished() for req in (*waiting, *requests_with_rows(scheduler))):
        postpone(scheduler, message)
        return None
    if admission is not None:
        admission.control.forget_adapter(adapter)
    return unload(scheduler, message)


@_SCHEDULER.feature("get_internal_state", "AFTER", "/server_info reports the host tier and storage")
def get_internal_state(result: Any, scheduler: Any, *_args: Any) -> Any:
    """Add the counts of the host tier and storage."""
    if admission_of(scheduler) is not None and (tiers := scheduler.tree_cache.tiers) is not None:
        result.internal_state |= tiers.numbers()
    return result

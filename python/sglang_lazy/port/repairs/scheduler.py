"""What must not end SGLang's scheduler: messages of operators, such as weight updates, turns of sessions, and adapters
without a place in memory.

SGLang's scheduler ends with any error in their handlers: a weight update that cannot flush the cache, memory that is
resumed but was not released, a recording that is not configured. Here the operator gets the error. What needs an idle
scheduler waits for requests that are only ending, and is refused while others are there. A paused scheduler counts as
idle if nothing has a row: waiting requests hold no KV that a flush could take from them, as SGLang documents of
`retract`.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.lora.utils import get_normalized_target_modules, get_target_module_name
from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import (
    BaseReq,
    FlushCacheReqOutput,
    UpdateWeightFromDiskReqOutput,
    hook_custom_types,
)
from sglang.srt.managers.tokenizer_control_mixin import _COMMUNICATOR_SPECS
from sglang.utils import TypeBasedDispatcher

from sglang_lazy.core.state import is_internal
from sglang_lazy.port.facts import UPDATES
from sglang_lazy.port.hooks import Hooks

_POSTPONED = "_sglang_lazy_postponed"
"""Attribute of a scheduler with messages to handle again in a later step."""
_logger = logging.getLogger(__name__)
HOOKS = Hooks()
_SCHEDULER = HOOKS.on("sglang.srt.managers.scheduler.Scheduler")
_UPDATER = HOOKS.on("sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager")
_ANSWERED = "SGLang answers errors of these messages (sglang#24123)"


# mypy does not know that msgspec structs take class arguments.
class OperationFailed(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Answers a message whose handler has failed, in place of an `answer`, the name of a type."""

    answer: str
    reason: str


hook_custom_types(OperationFailed)


class OperationError(RuntimeError):
    """An operator's message failed; its routes answer with a 400."""


# In the scheduler


@_SCHEDULER.repair(
    "init_request_dispatcher", "AFTER", "an operator's failing message does not end the scheduler", _ANSWERED
)
def guard(_result: Any, scheduler: Any) -> None:
    """Answer operators' messages with the errors of their handlers.

    Of a weight update, only refusals. Any other error may leave part of the weights loaded, on some tensor-parallel
    ranks only, so it ends the scheduler, as in SGLang.
    """
    answers = {spec[1] for spec in _COMMUNICATOR_SPECS} | {UpdateWeightFromDiskReqOutput}
    answers.remove(FlushCacheReqOutput)  # a cache that is emptied in part would give wrong answers
    handlers = scheduler._request_dispatcher._mapping
    for message, handler in handlers.items():
        name = message.__name__.removesuffix("Input")
        answer = getattr(io_struct, f"{name}Output", None)
        if answer is not None and answer in answers:
            handlers[message] = _guarded(handler, answer.__name__)


def _guarded(handler: Callable, answer: str) -> Callable:
    def handle(message: Any) -> Any:
        try:
            return handler(message)
        except OperationError as error:
            return OperationFailed(answer=answer, reason=str(error))
        except Exception as error:
            if answer.startswith("UpdateWeight"):
                raise
            _logger.exception("sglang-lazy: an operator's %s failed", type(message).__name__)
            return OperationFailed(answer=answer, reason=f"{type(error).__name__}: {error}")

    return handle


def postpone(scheduler: Any, message: Any) -> None:
    """Handle a message again in the next step. Its handler returns None, so that it is not answered yet."""
    vars(scheduler).setdefault(_POSTPONED, []).append(message)


@_SCHEDULER.repair(
    "process_input_requests", "AFTER", "messages that need an idle scheduler wait for it", "SGLang postpones them"
)
def handle_postponed(_result: Any, scheduler: Any, _messages: list[Any]) -> None:
    """After `Scheduler.process_input_requests`, once a step."""
    for message in vars(scheduler).pop(_POSTPONED, ()):
        output = scheduler._request_dispatcher(message)
        if output is not None:
            scheduler.send_control_output(output, message)


@_UPDATER.repair(
    ("release_memory_occupation", *UPDATES),
    "AROUND",
    "weight updates wait for an idle scheduler",
    "SGLang refuses them before it changes anything (sglang#14062)",
)
def when_idle(handler: Callable, updater: Any, message: Any) -> Any:
    """Around handlers of `SchedulerWeightUpdaterManager` that SGLang lets fail unless the scheduler is idle.

    Raises OperationError while it is not, unless its requests are only ending.
    """
    scheduler = updater.scheduler
    if not getattr(message, "flush_cache", True) or scheduler.is_fully_idle():
        return handler(updater, message)
    paused, waiting = scheduler._engine_paused, scheduler.grammar_manager.grammar_queue
    if not paused:
        waiting = waiting or scheduler.waiting_queue
    if waiting or any(paused or not _is_ending(scheduler, req) for req in requests_with_rows(scheduler)):
        raise OperationError(
            "the cache cannot be emptied while requests run or wait: abort them, or pause in retract mode"
        )
    if paused and scheduler.enable_hierarchical_cache:
        scheduler.tree_cache.check_hicache_events()  # which otherwise batch formation does
    postpone(scheduler, message)
    return None


def requests_with_rows(scheduler: Any) -> Iterator[Any]:
    """The requests that are being computed."""
    for batch in (scheduler.running_batch, scheduler.last_batch):
        yield from () if batch is None else batch.reqs
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def _is_ending(scheduler: Any, req: Any) -> bool:
    """Whether nobody waits for a request any more, if no request waits for it."""
    aborted = req.to_finish is not None or req is scheduler._pending_chunked_abort_req
    return req.finished() or aborted or is_internal(req)


@_UPDATER.repair("resume_memory_occupation", "BEFORE", "memory that was not released is an error", _ANSWERED)
def check_released(updater: Any, message: Any) -> None:
    """Only what was released can be resumed."""
    tags = message.tags or GPU_MEMORY_ALL_TYPES
    if lost := [tag for tag in tags if tag not in updater.offload_tags]:
        raise OperationError(f"this memory was not released: {', '.join(lost)}")


@_UPDATER.repair("release_memory_occupation", "BEFORE", "memory that was released before is an error", _ANSWERED)
def check_held(updater: Any, message: Any) -> None:
    """Only what is held can be released."""
    tags = message.tags or GPU_MEMORY_ALL_TYPES
    if unknown := [tag for tag in tags if tag not in GPU_MEMORY_ALL_TYPES]:
        raise OperationError(f"unknown tags: {', '.join(unknown)}; known are {', '.join(GPU_MEMORY_ALL_TYPES)}")
    if lost := [tag for tag in tags if tag in updater.offload_tags]:
        raise OperationError(f"this memory was released before: {', '.join(lost)}")


@_SCHEDULER.repair("set_internal_state", "AFTER", "internal state that cannot be set is an error", _ANSWERED)
def check_updated(output: Any, _scheduler: Any, message: Any) -> Any:
    """After `Scheduler.set_internal_state`, which changes all values or none, and answers with a 200 anyway."""
    if not output.updated:
        raise OperationError(
            f"nothing was changed: not all of {', '.join(message.server_args)} can be set to these values while the "
            "server runs; its log says which"
        )
    return output


# In the HTTP process


@HOOKS.on("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin").repair(
    "init_communicators", "AFTER", "operators get the errors of their messages", _ANSWERED
)
def init_communicators(_result: Any, manager: Any) -> None:
    """Pass failures to whoever waits for the answer."""
    waiting = {spec[1].__name__: f"{spec[0]}_communicator" for spec in _COMMUNICATOR_SPECS}

    def fail(failure: OperationFailed) -> None:
        if failure.answer in waiting:
            getattr(manager, waiting[failure.answer]).handle_recv(failure)
        else:
            output = UpdateWeightFromDiskReqOutput(success=False, message=failure.reason, num_paused_requests=0)
            manager._handle_update_weights_from_disk_req_output(output)

    manager._result_dispatcher += TypeBasedDispatcher([(OperationFailed, fail)])


@HOOKS.on("sglang.srt.managers.communicator.FanOutCommunicator").repair(
    "__call__", "AROUND", "operators get the errors of their messages", _ANSWERED
)
async def call(send: Callable, communicator: Any, message: Any) -> list[Any]:
    """Raise OperationError if a scheduler answers with a failure."""
    results = await send(communicator, message)
    for result in results:
        if isinstance(result, OperationFailed):
            raise OperationError(result.reason)
    return results


# Sessions


@HOOKS.on("sglang.srt.session.session_controller.Session").repair(
    "create_req", "BEFORE", "replaced turns of a session do not end the scheduler", "SGLang iterates over a copy"
)
def drop_turns(session: Any, req: Any, *_args: Any, **_kwargs: Any) -> None:
    """If the new turn replaces all others, drop them, so that SGLang finds none."""
    params = req.session_params
    if params.replace and params.rid is None and not session.streaming:
        for node in [*session.req_nodes.values()]:
            node.clear(session.req_nodes)


@HOOKS.on("sglang.srt.session.session_controller.SessionReqNode").repair(
    "clear", "AROUND", "long sessions can be cut", "SGLang clears them without recursion"
)
def clear(_original: Callable, node: Any, req_dict: dict[str, Any]) -> None:
    """Abort and remove a turn and those after it. Another turn may have taken its id."""
    turns = [node]
    while turns:
        turn = turns.pop()
        turns += turn.children
        turn.children = []
        turn.abort()
        rid = turn.req.rid
        if req_dict.get(rid) is turn:
            del req_dict[rid]


# Adapters


@HOOKS.on("sglang.srt.lora.lora_manager.LoRAManager").repair(
    ("load_lora_weights", "load_lora_weights_from_tensors"),
    "AFTER",
    "an adapter without a place in memory is refused",
    "SGLang looks for it when it loads an adapter",
)
def find_places(_result: Any, manager: Any, adapter: Any, *_weights: Any) -> None:
    """SGLang looks when the first request names the adapter. For Nemotron-H's MLP, which has no gate, it finds none.

    adapter: its `LoRARef`.
    Raises ValueError for a weight without a place: the adapter is not loaded, and a server that starts with it ends.
    """
    config = manager.configs[adapter.lora_id]
    # At the start SGLang learns from all adapters what memory is for.
    places = {*getattr(manager, "target_modules", ()), *get_normalized_target_modules(config.target_modules)}
    if "all" in places:
        return
    try:
        for layer in manager.loras[adapter.lora_id].layers:
            for name in layer.weights:
                get_target_module_name(name, places)
    except ValueError as error:
        del manager.loras[adapter.lora_id], manager.configs[adapter.lora_id]
        raise ValueError(f"{error}: SGLang does not serve adapters of this module in this model") from None

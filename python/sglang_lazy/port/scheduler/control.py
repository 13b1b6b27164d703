"""Messages about chunks from SGLang's HTTP process to its schedulers, sent like SGLang's own control messages.

SGLang delivers each to all ranks of a scheduler in the same step; the first rank answers.
"""

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, PickleWrapper, hook_custom_types, unwrap_from_pickle, wrap_as_pickle
from sglang.utils import TypeBasedDispatcher

from sglang_lazy.port.facts import dp_rank
from sglang_lazy.port.hooks import required, unused

UNUSED_HOOKS = "unused hooks"
"""The verb that asks for the required hooks that have not run, as `unused`."""


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


def init_request_dispatcher(_result: Any, scheduler: Any) -> None:
    """After `Scheduler.init_request_dispatcher`: handle our messages."""

    def handle(message: ChunksReqInput) -> ChunksReqOutput:
        admission = getattr(scheduler.tree_cache, "admission", None)
        rank = dp_rank()
        if admission is None:
            return ChunksReqOutput(answer=None, dp_rank=rank)
        if message.verb == UNUSED_HOOKS:
            answer = {"unused": unused("scheduler")}
        else:
            answer = admission.control.handle(message.verb, unwrap_from_pickle(message.arguments), message.now)
        return ChunksReqOutput(answer=wrap_as_pickle(answer), dp_rank=rank)

    scheduler._request_dispatcher += TypeBasedDispatcher([(ChunksReqInput, handle)])


HOOKS = (
    required(
        "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
        init_request_dispatcher,
        "AFTER",
        "scheduler",
        "schedulers answer messages about chunks",
    ),
)

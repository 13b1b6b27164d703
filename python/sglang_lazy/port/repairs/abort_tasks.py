"""What SGLang does two seconds after a stream has ended: it aborts the request by its id, in case the client has left.

It does so for requests that were refused or answered as well. Then the id may be another request's, which would be
aborted; or the request has not been read so far that it has one, and an error closes the connection.

Can go once SGLang's task knows the states of its request.
"""

import asyncio
from typing import Any

from starlette.background import BackgroundTask

from sglang_lazy.port.hooks import repair

SECONDS = 2
_BEGUN = "_sglang_lazy_begun"


def begin(_result: Any, manager: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `TokenizerManager._init_req_state`, which refuses ids in use: keep this request's states."""
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    setattr(obj, _BEGUN, {rid: manager.rid_to_state[rid] for rid in rids})


def create_abort_task(_create: Any, manager: Any, obj: Any) -> BackgroundTask:
    """Around `TokenizerManager.create_abort_task`: abort what still runs of this request."""

    async def abort() -> None:
        await asyncio.sleep(SECONDS)
        for rid, state in getattr(obj, _BEGUN, {}).items():
            if manager.rid_to_state.get(rid) is state:
                manager.abort_request(rid)

    return BackgroundTask(abort)


_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    repair(
        f"{_TOKENIZER_MANAGER}._init_req_state",
        begin,
        "AFTER",
        "a stream that has ended aborts nobody else's request",
        "SGLang's task knows whether its request still runs",
    ),
    repair(
        f"{_TOKENIZER_MANAGER}.create_abort_task",
        create_abort_task,
        "AROUND",
        "a stream that has ended aborts nobody else's request",
        "SGLang's task knows whether its request still runs",
    ),
)

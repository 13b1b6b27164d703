"""What SGLang does two seconds after a stream has ended: it aborts the request by its id, in case the client has left.

It does so for a request that it has refused as well. Then the id may be another request's, which would be aborted, or
the request has not been read so far that it has one, and an error closes the connection.

Can go once SGLang's task knows whether its request was accepted.
"""

from collections.abc import Callable
from typing import Any

from starlette.background import BackgroundTask

from sglang_lazy.port.hooks import Hook

_ACCEPTED = "_sglang_lazy_accepted"


def accept(_result: Any, _manager: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `TokenizerManager._init_req_state`, which refuses ids in use: from now on the id is this request's."""
    setattr(obj, _ACCEPTED, True)


def create_abort_task(create: Callable, manager: Any, obj: Any) -> BackgroundTask:
    """Around `TokenizerManager.create_abort_task`: abort only what was accepted."""
    tasks = create(manager, obj)

    async def abort_accepted() -> None:
        if getattr(obj, _ACCEPTED, False):
            await tasks()

    return BackgroundTask(abort_accepted)


_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    Hook(f"{_TOKENIZER_MANAGER}._init_req_state", accept, "AFTER"),
    Hook(f"{_TOKENIZER_MANAGER}.create_abort_task", create_abort_task, "AROUND"),
)

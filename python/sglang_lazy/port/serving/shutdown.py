"""Graceful shutdown on SIGTERM: every request is either answered, or finds the port closed."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils import get_bool_env_var, kill_process_tree

GRACE = 10
"""Seconds in which clients must have sent the rest of their requests, and received their answers."""

_server: Any = None
"""The uvicorn server of this process, if it has one."""


def keep_server(server: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `Server.startup`: so that the port can be closed."""
    global _server
    _server = server


async def close_when_answered(end: Callable, manager: Any) -> None:
    """Around `TokenizerManager.sigterm_watchdog`: close the port when all requests have been answered.

    Stock SGLang would leave it open while it waits for its schedulers: requests that arrive in that time would hang.
    Then it would wait for all clients, even those that send no more or whose answers no scheduler is left to finish:
    they are cut off. One of several tokenizer workers must not end the schedulers that others still need, so it ends
    only itself. When all have ended, the process that started them ends the rest.
    """
    while not manager.gracefully_exit or (manager.rid_to_state and not _ends_at_once(manager)):
        await asyncio.sleep(0.5)
    if _server is None:
        return await end(manager)
    if not _ends_at_once(manager):
        closing = asyncio.ensure_future(_server.shutdown())
        await asyncio.wait((closing,), timeout=GRACE)
        while manager.rid_to_state and not closing.done():
            await asyncio.sleep(0.5)
        if isinstance(manager, TokenizerWorker):
            kill_process_tree(os.getpid())
    await end(manager)
    for connection in tuple(_server.server_state.connections):
        connection.transport.abort()


def _ends_at_once(manager: Any) -> bool:
    return manager.server_status == ServerStatus.UnHealthy or get_bool_env_var("SGL_FORCE_SHUTDOWN")

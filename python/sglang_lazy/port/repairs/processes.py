"""Faults of SGLang's processes: how they end, and what clients can write into their logs.

They end soon after one of them has died, without traces, and on SIGTERM once every request is answered, or finds the
port closed. SGLang logs error messages with what clients sent, such as an adapter's name, in which a line break would
begin a line like the server's own. Here further lines of a message are indented, and control characters escaped.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import psutil
from sglang.srt.environ import envs
from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils import get_bool_env_var, kill_process_tree
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

from sglang_lazy.core.log_lines import Indented
from sglang_lazy.port.hooks import Hooks

GRACE = 10
"""Seconds in which clients must have sent the rest of their requests, and received their answers."""

_server: Any = None
"""The uvicorn server of this process, if it has one."""
HOOKS = Hooks()
_COMMON = HOOKS.on("sglang.srt.utils.common")
_TOKENIZER_MANAGER = HOOKS.on("sglang.srt.managers.tokenizer_manager.TokenizerManager")


class Grandchild:
    """A process started by a child process, with the interface that SGLang's watchdog expects."""

    exitcode = None  # known only to its parent

    def __init__(self, process: psutil.Process):
        self.pid, self._process = process.pid, process

    def is_alive(self) -> bool:
        try:
            return self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@HOOKS.on("sglang.srt.utils.watchdog.SubprocessWatchdog").repair(
    "start",
    "BEFORE",
    "a server ends when a scheduler under a data-parallel controller dies",
    "SGLang's watchdog sees these schedulers (sglang#35804)",
)
def watch_schedulers(watchdog: Any) -> None:
    """Also watch the schedulers of data-parallel ranks.

    SGLang watches only their controller, which keeps running if one is killed; requests to that rank would hang.
    """
    children = {process.pid for process in watchdog._processes}
    for process in collect_scheduler_processes():
        if process.pid not in children and process.ppid() in children:
            watchdog._processes.append(Grandchild(process))
            watchdog._names.append(process.name())


@_TOKENIZER_MANAGER.repair(
    "dump_requests_before_crash",
    "BEFORE",
    "no traceback when requests cannot be dumped",
    "SGLang dumps only where it was asked to",
)
def skip_impossible_dump(_manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Do not wait for a CUDA core dump that nobody enabled.

    During that minute the server would accept requests and answer none.
    """
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH.set(False)


@HOOKS.on("uvicorn.supervisors.multiprocess.Multiprocess").repair(
    "__init__",
    "AFTER",
    "several tokenizer workers end when the server fails",
    "SGLang's supervisor of workers handles SIGQUIT",
)
def end_on_quit(_result: Any, _supervisor: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Multiprocess.__init__` of uvicorn, which supervises several tokenizer workers: SIGQUIT ends the server.

    SGLang sends it to this process when another one has died; uvicorn would take it and do nothing.
    """
    signal.signal(signal.SIGQUIT, lambda _number, _frame: kill_process_tree(os.getpid()))


def start_resource_tracker() -> None:
    """Start Python's resource tracker, if it does not run yet, without its warning: it cleans up after processes, and
    SGLang kills all of its own."""
    sys.warnoptions.append("ignore::UserWarning:multiprocessing.resource_tracker")
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()


@_COMMON.repair(
    "kill_process_tree",
    "AROUND",
    "processes that end without tracebacks of Python's resource tracker",
    "SGLang leaves the tracker alone",
)
def spare_resource_tracker(
    kill: Callable,
    parent_pid: int | None,
    include_parent: bool = True,
    skip_pid: int | None = None,
    wait_timeout: float | None = None,
) -> Any:
    """Leave Python's resource tracker to a process that lives on.

    When that process exits, a new tracker would be told of resources that it does not know, and print a traceback. The
    first one ends with the process.
    """
    if not include_parent and parent_pid in (None, os.getpid()) and skip_pid is None:
        skip_pid = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return kill(parent_pid, include_parent, skip_pid, wait_timeout)


@HOOKS.on("uvicorn.server.Server").repair(
    "startup", "BEFORE", "a server that ends can close its port", "SGLang closes the port first"
)
def keep_server(server: Any, *_args: Any, **_kwargs: Any) -> None:
    """So that the port can be closed."""
    global _server
    _server = server


@_TOKENIZER_MANAGER.repair(
    "sigterm_watchdog",
    "AROUND",
    "a server that ends answers everybody, or closes its port",
    "SGLang closes the port first",
)
async def close_when_answered(end: Callable, manager: Any) -> None:
    """Close the port when all requests have been answered.

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


@_COMMON.repair("configure_logger", "AFTER", "clients cannot forge lines of the log", "SGLang escapes what it logs")
def indent_lines(_result: Any, *_args: Any, **_kwargs: Any) -> None:
    """Indent all lines of a message but the first."""
    for handler in logging.root.handlers:
        if not isinstance(handler.formatter, Indented):
            handler.setFormatter(Indented(handler.formatter or logging.Formatter()))

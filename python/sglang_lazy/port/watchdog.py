"""Close gaps in how SGLang's processes end: soon after one of them has died, and without traces."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

import psutil
from sglang.srt.environ import envs
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

from sglang_lazy.port.hooks import repair


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


def watch_schedulers(watchdog: Any) -> None:
    """Before `SubprocessWatchdog.start`: also watch the schedulers of data-parallel ranks.

    SGLang watches only their controller, which keeps running if one is killed; requests to that rank would hang.
    """
    children = {process.pid for process in watchdog._processes}
    for process in collect_scheduler_processes():
        if process.pid not in children and process.ppid() in children:
            watchdog._processes.append(Grandchild(process))
            watchdog._names.append(process.name())


def skip_impossible_dump(_manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `TokenizerManager.dump_requests_before_crash`: do not wait for a CUDA core dump that nobody enabled.

    During that minute the server would accept requests and answer none.
    """
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH.set(False)


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


def spare_resource_tracker(
    kill: Callable,
    parent_pid: int | None,
    include_parent: bool = True,
    skip_pid: int | None = None,
    wait_timeout: float | None = None,
) -> Any:
    """Around `kill_process_tree`: leave Python's resource tracker to a process that lives on.

    When that process exits, a new tracker would be told of resources that it does not know, and print a traceback. The
    first one ends with the process.
    """
    if not include_parent and parent_pid in (None, os.getpid()) and skip_pid is None:
        skip_pid = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]
    return kill(parent_pid, include_parent, skip_pid, wait_timeout)


HOOKS = (
    repair(
        "sglang.srt.utils.common.kill_process_tree",
        spare_resource_tracker,
        "AROUND",
        "processes that end without tracebacks of Python's resource tracker",
        "SGLang leaves the tracker alone",
    ),
    repair(
        "sglang.srt.utils.watchdog.SubprocessWatchdog.start",
        watch_schedulers,
        "BEFORE",
        "a server ends when a scheduler under a data-parallel controller dies",
        "SGLang's watchdog sees these schedulers",
    ),
    repair(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.dump_requests_before_crash",
        skip_impossible_dump,
        "BEFORE",
        "no traceback when requests cannot be dumped",
        "SGLang dumps only where it was asked to",
    ),
    repair(
        "uvicorn.supervisors.multiprocess.Multiprocess.__init__",
        end_on_quit,
        "AFTER",
        "several tokenizer workers end when the server fails",
        "SGLang's supervisor of workers handles SIGQUIT",
    ),
)

"""Close gaps in SGLang's watchdog, so that a server ends soon after one of its processes has died."""

import os
import signal
from typing import Any

import psutil
from sglang.srt.environ import envs
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

from sglang_lazy.port.hooks import Hook


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


HOOKS = (
    Hook("sglang.srt.utils.watchdog.SubprocessWatchdog.start", watch_schedulers, "BEFORE"),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.dump_requests_before_crash",
        skip_impossible_dump,
        "BEFORE",
    ),
    Hook("uvicorn.supervisors.multiprocess.Multiprocess.__init__", end_on_quit, "AFTER"),
)

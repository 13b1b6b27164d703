"""A server whose process has died ends soon: SGLang's watch over its processes, where that has gaps."""

import os
from typing import Any

import psutil
from sglang.srt.environ import envs
from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

from sglang_lazy.port.hooks import Hook


class Grandchild:
    """A process that a child started, as SGLang's watchdog sees one."""

    exitcode = None  # only its parent learns it

    def __init__(self, process: psutil.Process):
        self.pid, self._process = process.pid, process

    def is_alive(self) -> bool:
        try:
            return self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def watch_schedulers(watchdog: Any) -> None:
    """Before `SubprocessWatchdog.start`: watch the schedulers of data-parallel ranks, too.

    SGLang watches their controller, which goes on without one that was killed: requests for that rank would hang.
    """
    children = {process.pid for process in watchdog._processes}
    for process in collect_scheduler_processes():
        if process.pid not in children and process.ppid() in children:
            watchdog._processes.append(Grandchild(process))
            watchdog._names.append(process.name())


def skip_impossible_dump(_manager: Any, *_args: Any, **_kwargs: Any) -> None:
    """Before `TokenizerManager.dump_requests_before_crash`: do not wait for a CUDA core dump that nobody enabled.

    For that minute the server would take requests and answer none.
    """
    if os.environ.get("CUDA_ENABLE_USER_TRIGGERED_COREDUMP") != "1":
        envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH.set(False)


HOOKS = (
    Hook("sglang.srt.utils.watchdog.SubprocessWatchdog.start", watch_schedulers, "BEFORE"),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.dump_requests_before_crash",
        skip_impossible_dump,
        "BEFORE",
    ),
)

"""A process that has imported SGLang and forks servers: `template.py SOCKET SOCKET`.

Importing SGLang takes about ten seconds of CPU time in each of a server's three processes, and installing the plugin's
hooks three more; forks skip both. There are two template processes: forks requested through the first socket are
without the plugin, those through the second one have it installed. Otherwise a fork equals the command: its module runs
as `__main__`, with the given variables, folder and files. Processes that SGLang spawns there are also forks, made
before anything else ran, which then run the code that multiprocessing passes to new interpreters.
"""

import contextlib
import fcntl
import gc
import importlib
import logging
import multiprocessing.util
import os
import pickle
import pkgutil
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import setproctitle

from sglang_lazy.port import plugin

MESSAGE_BYTES = 1 << 20  # at most, of a job: mostly environment variables
NUM_SPARES = 5  # a server's scheduler and detokenizer, two tokenizer workers and a replacement; more are spawned
NUM_SPARES_OF_SPAWNED = 2  # the schedulers of two data-parallel ranks, which their controller spawns
MAX_FDS = 64


MODULES = (
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.layers.attention.torch_native_backend",
)
"""The modules that a server's processes need."""


class Job(NamedTuple):
    """The program of a fork. Three files are sent with it: for its report, its input and its output."""

    module: str
    arguments: Sequence[str]
    environment: dict[str, str]
    folder: str


def main() -> None:
    sys.path[0] = os.getcwd()  # as of a command, `python -m`
    if os.fork():
        os._exit(0)  # Become an orphan, since an engine that shuts down kills all descendants of its process.
    stock, ours = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    setproctitle.getproctitle()  # locates the title's memory, which it cannot after the environment is replaced
    with _set_aside():
        preload()
    # FlashInfer logs to a file. A fork that configures logging would close it and with it what has its number by then:
    # a socket that was passed to the fork. Closed here, the file is reopened by whoever logs.
    logging.shutdown()
    if os.fork():
        ours.close()
        stock.send(b"ready")
        serve(stock)
    else:
        stock.close()
        select.select([ours], [], [])  # install the plugin only when it is needed
        with _set_aside():
            plugin.install()
        serve(ours)


def preload() -> None:
    """Import MODULES, and every model that can be imported here: SGLang's registry tries all in each scheduler."""
    for name in MODULES:
        importlib.import_module(name)
    models = importlib.import_module("sglang.srt.models")
    for module in pkgutil.iter_modules(models.__path__, "sglang.srt.models."):
        with contextlib.suppress(Exception):
            importlib.import_module(module.name)


@contextlib.contextmanager
def _set_aside() -> Iterator[None]:
    """Exempt all objects made within, which stay, from garbage collection: visiting them would take long here, and in
    each fork, which would get copies of their memory."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def serve(control: socket.socket) -> None:
    """Fork for each job, and report its process id and its exit status. When `control` is closed, kill all forks."""
    running: dict[int, tuple[int, int]] = {}  # by pidfd
    while True:
        for ready in select.select([control.fileno(), *running], [], [])[0]:
            if ready in running:
                pid, report = running.pop(ready)
                os.write(report, struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                os.close(ready)
                os.close(report)
                continue
            message, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 3)
            if not message:
                for pid, _ in running.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                return
            pid = os.fork()
            if not pid:
                control.close()
                for pidfd, (_, report) in running.items():
                    os.close(pidfd)
                    os.close(report)
                run(Job(*pickle.loads(message)), *files)
            report, *others = files
            for fd in others:
                os.close(fd)
            running[os.pidfd_open(pid)] = pid, report


def run(job: Job, report: int, source: int, output: int) -> NoReturn:
    """Run `job` in this process."""
    os.setsid()
    os.write(report, struct.pack("i", os.getpid()))  # after setsid, since it also names the process group
    for fd, number in ((source, 0), (output, 1), (output, 2)):
        os.dup2(fd, number)
    for fd in (report, source, output):
        os.close(fd)
    # The template's own may hold a plugin of the first test that used it.
    before, given = (
        list(filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)))
        for variables in (os.environ, job.environment)
    )
    sys.path[:] = [*given, *(folder for folder in sys.path if folder not in {*before, *given})]
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    sys.argv = [job.module, *job.arguments]
    _spawn_from([Spare() for _ in range(NUM_SPARES)])
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)
    sys.exit()


class Spare:
    """A fork of this process, for multiprocessing to use instead of a new interpreter.

    closes: open files of this process that the fork closes.
    """

    def __init__(self, closes: Sequence[int] = ()) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self.socket.close()
            for fd in closes:
                os.close(fd)
            _become_spawned(theirs)
        theirs.close()

    def start(self, code: str, fds: Sequence[int]) -> None:
        """Run `code` in it, like `python -c`, with copies of these files under the same numbers."""
        socket.send_fds(self.socket, [pickle.dumps((code, list(fds), dict(os.environ)))], list(fds))
        self.socket.close()


def _become_spawned(server: socket.socket) -> NoReturn:
    message, files, _, _ = socket.recv_fds(server, MESSAGE_BYTES, MAX_FDS)
    server.close()
    if not message:
        os._exit(0)  # the server has ended
    code, numbers, environment = pickle.loads(message)
    # Move them to high numbers first: one may have arrived under the number that another needs.
    aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, 256) for fd in files]
    for fd in files:
        os.close(fd)
    for fd, number in zip(aside, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _spawn_from([Spare(numbers) for _ in range(NUM_SPARES_OF_SPAWNED)])
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", "--multiprocessing-fork"]
    exec(code, {})
    sys.exit()


def _spawn_from(spares: list[Spare]) -> None:
    """Let multiprocessing use these when it spawns, as long as there are any."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        # Only for its own children, not for its resource tracker or a wrapper such as numactl.
        if not spares or arguments[-1] != "--multiprocessing-fork" or os.fsdecode(path) != sys.executable:
            return spawn(path, arguments, fds)
        spare = spares.pop()
        spare.start(arguments[-2], sorted(set(fds)))
        return spare.pid

    # mypy does not allow assignments to functions of a module.
    multiprocessing.util.spawnv_passfds = spawnv_passfds  # type: ignore[assignment]


if __name__ == "__main__":
    main()

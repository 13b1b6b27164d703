"""Starts processes that import SGLang: as commands, or quicker, as forks of a process that has done so."""

import contextlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Protocol

import torch

from sglang_lazy.core.config import ENV_VAR


class ServerError(RuntimeError):
    """The server did not start, died or answered with an error."""


class Process(Protocol):
    """What `subprocess.Popen` and `Forked` have in common. It leads a session and process group of its own."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def start(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    source: IO | socket.socket | None,
    output: IO,
    as_command: bool = False,
) -> Process:
    """Run `python -m MODULE ARGUMENTS`.

    source: its standard input; None for nothing. output: for its standard output and errors.
    environment: variables for it, over those of this process.
    as_command: a new interpreter even where a fork would do. On a GPU there are no forks.
    """
    # Threads that spin while they wait would take a small machine's cores from the server's other processes.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **environment}
    # An engine of ours asks for the plugin in all that its process starts; for a server its own module decides.
    variables.pop(ENV_VAR, None)
    if as_command or torch.cuda.is_available():
        command = [sys.executable, "-m", module, *arguments]
        # A session of its own: Ctrl-C reaches us alone, and the group holds every process the server starts.
        files = dict(stdin=source or subprocess.DEVNULL, stdout=output, stderr=output)  # mypy checks no unpacked ones
        return subprocess.Popen(command, **files, env=variables, start_new_session=True)  # type: ignore[call-overload]
    # Some of SGLang's layers would have a C++ compiler busy for longer than all that a test asks of its server.
    variables.setdefault("TORCH_COMPILE_DISABLE", "1")
    job = module, list(arguments), variables, os.getcwd()
    with open(os.devnull, "rb") as nothing:
        return _template(variables).fork(job, (source or nothing).fileno(), output.fileno())


class Template:
    """The processes that have imported SGLang. They end with this one, and with them all that they forked."""

    def __init__(self, variables: Mapping[str, str]):
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        (self.stock, self.ours), theirs = zip(*pairs, strict=True)
        numbers = [control.fileno() for control in theirs]
        command = [sys.executable, "-m", "sglang_lazy.testing.template", *map(str, numbers)]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (open while they run)
        files = dict(stdin=subprocess.DEVNULL, stdout=self.errors, stderr=self.errors)
        # As above, mypy checks none of these.
        how = dict(env=variables, start_new_session=True, pass_fds=numbers)
        subprocess.run(command, check=True, **files, **how)  # type: ignore[call-overload]
        for control in theirs:
            control.close()
        if not self.stock.recv(8):
            raise self.ended()

    def fork(self, job: tuple, source: int, output: int) -> "Forked":
        """job: the fields of a `template.Job`; modules of ours find the plugin in place. source, output: open files."""
        control = self.ours if job[0].startswith("sglang_lazy.") else self.stock
        read, write = os.pipe()
        try:
            socket.send_fds(control, [pickle.dumps(job)], [write, source, output])
        finally:
            os.close(write)
        return Forked(self, read)

    def ended(self) -> ServerError:
        """The error that says what they wrote before they ended."""
        self.errors.seek(0)
        return ServerError(f"the process that forks servers has ended:\n{self.errors.read().decode(errors='replace')}")


class Forked:
    """A fork, seen through the pipe by which the template reports on it."""

    def __init__(self, template: Template, report: int):
        self.template = template  # must not end before this does
        self.report = report
        self.pid = self._read()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, as that of `subprocess.Popen`; None while it runs."""
        if self.returncode is None and select.select([self.report], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = self._read()
            os.close(self.report)
        return self.returncode

    def _read(self) -> int:
        data = os.read(self.report, 4)
        if not data:
            raise self.template.ended()
        return struct.unpack("i", data)[0]


READ_LATE = {
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_NCCL_SO_PATH",
    "SGLANG_REQ_WAITING_TIMEOUT",
    "SGLANG_RUN_ID",
    "SGLANG_TIMEOUT_KEEP_ALIVE",
    "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT",
}
"""Variables that differ between tests or engines, and decide nothing of what is imported first: it is
servers that read them, when they start or later. What PYTHONPATH adds is added in forks."""

_current: tuple[dict[str, str], Template] | None = None


def _template(variables: Mapping[str, str]) -> Template:
    """The template of servers with these variables: modules read some when they are imported. The last one is kept."""
    global _current
    key = {name: value for name, value in variables.items() if name not in READ_LATE}
    if _current is None or _current[0] != key:
        _current = key, Template(variables)
    return _current[1]


def end(process: Process) -> None:
    """Kill its process group, and wait for it. Asked to end, SGLang takes ten seconds and more, to drain requests:
    nobody who tried a server out has any left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

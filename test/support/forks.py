"""Start processes as forks of one that has imported SGLang, where there is no GPU: commands take many times as long.

Nothing depends on it: with `LAZY_FORKS=0` in the environment, tests start the commands.
"""

import os
import pickle
import select
import socket
import struct
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import torch

from sglang_lazy.testing.processes import Process, ServerError, command, uncompiled, variables_of

FORKS = not torch.cuda.is_available() and os.environ.get("LAZY_FORKS") != "0"


def start(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    source: IO | socket.socket | None,
    output: IO,
    installed: bool | None = None,
) -> Process:
    """As `sglang_lazy.testing.processes.command`, on a CPU without compiling.

    installed: whether a fork finds the plugin's hooks installed; by default if the module is ours.
    """
    environment = uncompiled(environment)
    if not FORKS:
        return command(module, arguments, environment=environment, source=source, output=output)
    variables = variables_of(environment)
    job = module, list(arguments), variables, os.getcwd()
    if installed is None:
        installed = module.startswith("sglang_lazy.")
    with open(os.devnull, "rb") as nothing:
        return _template(variables).fork(job, installed, (source or nothing).fileno(), output.fileno())


class Template:
    """The processes that have imported SGLang. They end with this process, and all their forks end with them."""

    def __init__(self, variables: Mapping[str, str]):
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
        (self.stock, self.ours), theirs = zip(*pairs, strict=True)
        numbers = [control.fileno() for control in theirs]
        command = [sys.executable, str(Path(__file__).with_name("template.py")), *map(str, numbers)]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (open while they run)
        files = dict(stdin=subprocess.DEVNULL, stdout=self.errors, stderr=self.errors)
        # Unpacked, as above.
        how = dict(env=variables, start_new_session=True, pass_fds=numbers)
        subprocess.run(command, check=True, **files, **how)  # type: ignore[call-overload]
        for control in theirs:
            control.close()
        if not self.stock.recv(8):
            raise self.ended()

    def fork(self, job: tuple, installed: bool, source: int, output: int) -> "Forked":
        """Fork a process.  job: the fields of a `template.Job`.  installed: whether the plugin is.
        source, output: open files."""
        control = self.ours if installed else self.stock
        read, write = os.pipe()
        try:
            socket.send_fds(control, [pickle.dumps(job)], [write, source, output])
        finally:
            os.close(write)
        return Forked(self, read)

    def ended(self) -> ServerError:
        """The error for their unexpected end, with their output."""
        self.errors.seek(0)
        return ServerError(f"the process that forks servers has ended:\n{self.errors.read().decode(errors='replace')}")


class Forked:
    """A fork.  report: the pipe through which the template reports on it."""

    def __init__(self, template: Template, report: int):
        self.template = template  # must not end before this does
        self.report = report
        self.pid = self._read()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, as from `subprocess.Popen`; None while it runs."""
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
"""Variables that differ between tests or engines and do not affect imports: servers read them when they start or later.
Forks have the folders of their own PYTHONPATH."""

_KEPT = 2
"""How many templates are kept: tests of models with recurrent layers alternate with others."""
_templates: OrderedDict[frozenset[tuple[str, str]], Template] = OrderedDict()


def _template(variables: Mapping[str, str]) -> Template:
    """The template of servers with these variables, some of which modules read on import. The last ones are kept."""
    key = frozenset((name, value) for name, value in variables.items() if name not in READ_LATE)
    if key not in _templates:
        _templates[key] = Template(variables)
    _templates.move_to_end(key)
    if len(_templates) > _KEPT:
        _templates.popitem(last=False)
    return _templates[key]

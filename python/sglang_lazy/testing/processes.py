"""Start processes that use SGLang, and end them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Protocol

import torch

from sglang_lazy.core.config import ENV_VAR


class ServerError(RuntimeError):
    """The server did not start, died or answered with an error."""


class Process(Protocol):
    """What is used of `subprocess.Popen`. The process leads its own session and process group."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


def variables_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that this one starts.  environment: variables that override those of this one."""
    # Threads that spin while waiting would take cores from the server's other processes.
    variables = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, **environment}
    # Our engines activate the plugin in all processes that this one starts; for a server, its own module decides.
    variables.pop(ENV_VAR, None)
    return variables


def command(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str],
    source: IO | socket.socket | None,
    output: IO,
) -> Process:
    """Run `python -m MODULE ARGUMENTS`.

    environment: variables for it, which override those of this process.
    source: its standard input; None for nothing. output: for its standard output and errors.
    """
    # Its own session: Ctrl-C reaches only us, and the group contains all processes that the server starts.
    files = dict(stdin=source or subprocess.DEVNULL, stdout=output, stderr=output)  # unpacked, hence the ignore
    return subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-m", module, *arguments], **files, env=variables_of(environment), start_new_session=True
    )


starter: Callable[..., Process] = command
"""What `start` calls. Tests put something faster with the same signature in its place."""


def start(module: str, arguments: Sequence[str], *, environment: Mapping[str, str], **how: Any) -> Process:
    """As `command`, by whatever `starter` is, and quicker on a CPU."""
    return starter(module, arguments, environment=uncompiled(environment), **how)


def uncompiled(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The same variables, and one that keeps SGLang from compiling layers with C++ for a CPU, which takes longer than
    all requests of a test or an example."""
    if torch.cuda.is_available() or "TORCH_COMPILE_DISABLE" in os.environ:
        return environment
    return {"TORCH_COMPILE_DISABLE": "1", **environment}


def end(process: Process) -> None:
    """Kill its process group, and wait for it. A graceful shutdown of SGLang takes ten seconds or more to drain
    requests, and there are none."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()

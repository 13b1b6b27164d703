"""A context manager that runs a server."""

import collections
import contextlib
import functools
import itertools
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import requests
import torch
from tqdm import tqdm

from sglang_lazy.testing.processes import Process, ServerError, command, end, start

CPU_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "sleep_on_idle": True,  # a scheduler that spins while waiting takes a core that others need
}
"""The SGLang options for a CPU, as `Engine` takes them."""


def device_options() -> dict[str, Any]:
    """The SGLang options for this machine, as `Engine` takes them."""
    return {"dtype": "bfloat16"} if torch.cuda.is_available() else CPU_OPTIONS


def device_flags() -> list[str]:
    """The same as command-line flags."""
    flags = []
    for name, value in device_options().items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    return flags


PORTS, BLOCK = range(20_000, 32_000), 200
"""Ports below the range of outgoing connections, and how many of them a process reserves."""

_choosing_ports = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Unused consecutive ports, from those that this process has reserved, the least recently returned ones first.

    A server binds a port seconds later, a NCCL port even a minute later. Until then an outgoing connection must not
    take it, and another process that looks for an unused port must not find it.
    """
    with _choosing_ports:  # servers are started in threads, too
        ports, _ = _reserved_ports()
        for _ in range(BLOCK):
            found = list(itertools.islice(ports, count))
            if found[-1] - found[0] == count - 1 and all(map(_is_unused, found)):
                ports.rotate(-count)
                return found
            ports.rotate(-1)
    raise ServerError(f"no {count} free ports were found")


@functools.cache
def _reserved_ports() -> tuple[collections.deque[int], socket.socket]:
    """The ports of this process, and the socket that reserves them: only one process can bind its name."""
    for first in random.sample(PORTS[::BLOCK], len(PORTS) // BLOCK):
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0sglang_lazy.testing ports {first}")
        except OSError:
            name.close()
        else:
            return collections.deque(range(first, first + BLOCK)), name
    raise ServerError(f"other processes have reserved all ports from {PORTS[0]} to {PORTS[-1]}")


def _is_unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _answers(port: int) -> bool:
    """Whether something listens at this port of the loopback address."""
    with socket.socket() as probe:
        probe.settimeout(5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def running_server(
    flags: list[str],
    log: Path,
    *,
    port: int | None = None,
    module: str = "sglang_lazy.launch_server",
    timeout: float = 300,
    usual: float = 30,
    environment: Mapping[str, str] | None = None,
    as_command: bool = False,
) -> Iterator[str]:
    """Start a server on a loopback port, yield its URL once it is healthy, and stop it on exit.

    log: file for the server's output.
    port: a free one by default. Raises ServerError if something answers there, which would be taken for the server.
    timeout, usual: seconds to wait at most, and seconds that the progress bar expects.
    environment: variables for the server, which override those of this process.
    as_command: start it like a user, whatever `processes.starter` is.
    """
    free_port, nccl_port = free_ports(2)
    if port is None:
        port = free_port
    elif _answers(port):
        raise ServerError(f"port {port} is in use: what answers there would be taken for the server")
    arguments = ["--host", "127.0.0.1", "--port", str(port), *flags]
    if "--dp-size" not in flags:  # all ranks would listen on this port
        arguments += ["--nccl-port", str(nccl_port)]
    environment = environment or {}
    with open(log, "wb") as output:
        begin = command if as_command else start
        process = begin(module, arguments, environment=environment, source=None, output=output)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process, timeout, usual)
        yield url
    finally:
        _stop(process)


def _wait_until_healthy(url: str, process: Process, timeout: float, usual: float) -> None:
    start = time.monotonic()
    layout = "{desc} {bar:30} {n:.0f} s, usually about {total:.0f} s"
    with tqdm(total=usual, desc="starting the server", bar_format=layout, leave=False, disable=None) as bar:
        while (elapsed := time.monotonic() - start) < timeout:
            bar.total = max(usual, elapsed)
            bar.update(elapsed - bar.n)
            if process.poll() is not None:
                raise ServerError(f"the server exited with status {process.returncode}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=5).ok:
                    return
            time.sleep(0.2)
    raise ServerError(f"the server was not ready within {timeout:.0f} s")


def _stop(process: Process) -> None:
    end(process)
    if not wait_for(lambda: not _group_alive(process), timeout=5):
        print(f"the server's processes are still there: end them with `kill -9 -{process.pid}`", file=sys.stderr)


def _group_alive(process: Process) -> bool:
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], bool], timeout: float = 60) -> bool:
    """Whether `condition` held within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return met


def log_tail(log: Path, lines: int = 25) -> str:
    """The last lines of a server's log, under a heading that names the file."""
    with open(log, encoding="utf-8", errors="replace") as file:
        tail = collections.deque(file, lines)
    return f"The last lines of {log}:\n\n{''.join(tail)}"

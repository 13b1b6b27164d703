"""Context managers that run the router `smg` and our middleware for it."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import requests

from sglang_lazy.testing.processes import ServerError, end
from sglang_lazy.testing.server import free_ports, wait_for


@contextlib.contextmanager
def running_smg(command: Path, workers: Sequence[str], log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start the router `smg` as in docs/routing.md, and yield its URL once all workers are healthy.

    command: the executable.  workers: their URLs.  flags: additional ones.
    """
    port, metrics_port = free_ports(2)
    arguments = ["launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    arguments += ["--worker-urls", *workers, "--policy", "consistent_hashing", "--disable-retries"]
    arguments += ["--disable-circuit-breaker", "--health-check-interval-secs", "2", "--log-level", "warn", *flags]
    url = f"http://127.0.0.1:{port}"

    def has_all() -> bool:
        answer = requests.get(f"{url}/workers", timeout=5)
        return [worker["is_healthy"] for worker in answer.json()["workers"]] == [True] * len(workers)

    with _running([str(command), *arguments], log, has_all):
        yield url


@contextlib.contextmanager
def running_middleware(router: str, log: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """Start `python -m sglang_lazy.routing` in front of the router, and yield its URL once it answers."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "sglang_lazy.routing", "--router", router, "--port", str(port), *flags]
    url = f"http://127.0.0.1:{port}"
    with _running(command, log, lambda: requests.get(f"{url}/health", timeout=5).ok):
        yield url


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path, ready: Callable[[], bool]) -> Iterator[None]:
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )

    def starts() -> bool:
        if process.poll() is not None:
            raise ServerError(f"{command[0]} exited with status {process.returncode}: see {log}")
        with contextlib.suppress(requests.RequestException):
            return ready()
        return False

    try:
        if not wait_for(starts, timeout=60):
            raise ServerError(f"{command[0]} was not ready within a minute: see {log}")
        yield
    finally:
        end(process)

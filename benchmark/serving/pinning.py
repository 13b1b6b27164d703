"""Pins the processes of a comparison to cores of their own, so that none is slowed by where another happens to run.

SGLang's schedulers spin while they wait, and two threads on one core slow each other down: otherwise chance decides
which process shares a core with an idle server's scheduler, for seconds or for a whole run.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil

TOPOLOGY = Path("/sys/devices/system/cpu")
SCHEDULER, DETOKENIZER = "sglang::scheduler", "sglang::detokenizer"
"""Prefixes of the names that SGLang gives its processes."""


def physical_cores() -> list[set[int]]:
    """The CPUs that this process may use, grouped by core."""
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in allowed}
    return [set(core) & allowed for core in sorted(cores, key=min)]


def _siblings(cpu: int) -> frozenset[int]:
    ranges = (TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip().split(",")
    ends = [list(map(int, part.split("-"))) for part in ranges]
    return frozenset(number for end in ends for number in range(end[0], end[-1] + 1))


@contextlib.contextmanager
def pinned(urls: list[str]) -> Iterator[None]:
    """Pin this process and its child servers at `urls` to cores of their own for the length of a `with` block.

    Each scheduler gets a core of its own. The HTTP processes, which sleep while they wait, share one core, the
    detokenizers share another, and this process gets a third. Raises ValueError if there are too few cores.
    """
    allowed, cores = os.sched_getaffinity(0), physical_cores()
    processes = [process for url in urls for process in server_processes(url)]
    needed = 3 + sum(_title(process).startswith(SCHEDULER) for process in processes)
    if len(cores) < needed:
        raise ValueError(f"pinning these processes takes {needed} cores, but there are {len(cores)}")
    client, http, detokenizer, *schedulers = cores
    for process in processes:
        title = _title(process)
        if title.startswith(SCHEDULER):
            _pin_threads(process, schedulers.pop())
        else:
            _pin_threads(process, detokenizer if title.startswith(DETOKENIZER) else http)
    _pin_threads(psutil.Process(), client)
    try:
        yield
    finally:
        _pin_threads(psutil.Process(), allowed)  # for servers that start later


def server_processes(url: str) -> list[psutil.Process]:
    """This process's child that serves `url`, and all its descendants."""
    port = str(urlsplit(url).port)
    (server,) = (child for child in psutil.Process().children() if port in _command(child))
    return [server, *server.children(recursive=True)]


def _command(process: psutil.Process) -> list[str]:
    """The command line of a process; empty if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def _title(process: psutil.Process) -> str:
    return "".join(_command(process)[:1])


def _pin_threads(process: psutil.Process, cpus: Iterable[int]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread.id, cpus)

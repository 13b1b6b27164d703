"""The core that each process of a comparison is pinned to; servers are stand-ins with SGLang's process titles."""

import contextlib
import os
import subprocess
import sys

import pytest

from benchmark.serving import pinning

CPUS = sorted(os.sched_getaffinity(0))
WAIT = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print(flush=True); sys.stdin.read()"
SERVE = f"""
import subprocess, sys
for name in sys.argv[2:]:
    subprocess.Popen([name, "-c", {WAIT!r}], executable=sys.executable)
{WAIT}
"""
CHILDREN = ("sglang::scheduler", "sglang::detokenizer", "other")


@pytest.fixture
def servers():
    """URLs of two servers: each is a process with the port among its arguments, and three children."""
    with contextlib.ExitStack() as stack:
        for port in ("2001", "2002"):
            command = [sys.executable, "-c", SERVE, port, *CHILDREN]
            server = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            stack.callback(server.stdin.close)
            for _ in range(1 + len(CHILDREN)):
                server.stdout.readline()
        yield ["http://127.0.0.1:2001", "http://127.0.0.1:2002"]


def affinities(url):
    """By the first word of a process's command line: the CPUs allowed to each of its threads."""
    return {
        os.path.basename(process.cmdline()[0]): [os.sched_getaffinity(thread.id) for thread in process.threads()]
        for process in pinning.server_processes(url)
    }


def test_each_scheduler_has_a_core_of_its_own(servers, monkeypatch):
    class Core(set):
        """CPUs distinguishable from the same CPUs of another core."""

    cores, calls, before = [Core([CPUS[0]]) for _ in range(5)], [], os.sched_getaffinity(0)
    monkeypatch.setattr(pinning, "physical_cores", lambda: cores)
    pin_threads = pinning._pin_threads
    monkeypatch.setattr(
        pinning, "_pin_threads", lambda process, core: (calls.append((process, core)), pin_threads(process, core))
    )
    with pinning.pinned(servers):
        assert os.sched_getaffinity(0) == {CPUS[0]}
        for url in servers:
            assert all(threads == [{CPUS[0]}] * 2 for threads in affinities(url).values())
        found = {}
        for process, core in calls:
            # This process is found by its id, since a parallel test run changes its title.
            name = "client" if process.pid == os.getpid() else os.path.basename(process.cmdline()[0])
            found.setdefault(name, set()).add(id(core))
    schedulers, detokenizers = found["sglang::scheduler"], found["sglang::detokenizer"]
    http, client = found[os.path.basename(sys.executable)] | found["other"], found["client"]
    assert [len(cores) for cores in (schedulers, detokenizers, http, client)] == [2, 1, 1, 1]
    assert len({*schedulers, *detokenizers, *http, *client}) == 5
    assert os.sched_getaffinity(0) == before, "servers started later inherit it"


def test_too_few_cores_are_reported(servers, monkeypatch):
    monkeypatch.setattr(pinning, "physical_cores", lambda: [{CPUS[0]}] * 4)
    before = [affinities(url) for url in servers]
    with pytest.raises(ValueError, match="takes 5 cores, but there are 4"), pinning.pinned(servers):
        pass
    assert [affinities(url) for url in servers] == before


def test_hyperthreads_are_grouped_by_core(tmp_path, monkeypatch):
    """Hyperthreads of one core stay together, restricted to the CPUs that this process may use."""
    for cpu, siblings in enumerate(["0,4", "1,5", "2-3", "2-3", "0,4", "1,5"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(pinning, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    assert pinning.physical_cores() == [{0, 4}, {1}, {2, 3}]


def test_finished_children_are_skipped(servers):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie until the block ends
        assert len(pinning.server_processes(servers[0])) == 1 + len(CHILDREN)

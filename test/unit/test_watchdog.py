"""Processes whose death ends the server: those of SGLang's watchdog, and those that ours adds."""

import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest
from sglang.srt.environ import envs
from sglang.srt.utils import watchdog as stock

from sglang_lazy.port.repairs.processes import skip_impossible_dump, watch_schedulers

SLEEP = "import sys, time; from setproctitle import setproctitle; setproctitle({title!r}); {then}; time.sleep(600)"
START = "import subprocess; subprocess.Popen([sys.executable, '-c', {program!r}]); print(flush=True)"


class Child:
    """A process started by this one, as `multiprocessing` presents it."""

    def __init__(self, popen):
        self.popen, self.pid = popen, popen.pid

    exitcode = property(lambda self: self.popen.poll())

    def is_alive(self):
        return self.popen.poll() is None


@pytest.fixture
def controller():
    """A child that started the scheduler of a data-parallel rank, and that scheduler."""
    scheduler = SLEEP.format(title="sglang::scheduler_DP0", then="print(flush=True)")
    program = SLEEP.format(title="sglang::data_parallel_controller", then=START.format(program=scheduler))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as popen:
        assert popen.stdout.readline() and popen.stdout.readline()  # both have set their process titles
        (rank,) = psutil.Process(popen.pid).children()
        yield Child(popen), rank
        for process in (rank, popen):
            process.kill()


def test_a_killed_rank_ends_the_server_though_its_controller_lives(controller, monkeypatch, caplog):
    child, rank = controller
    signals, ended = [], threading.Event()

    def kill(pid, number):
        signals.append((pid, number))
        ended.set()

    monkeypatch.setattr(stock, "os", SimpleNamespace(kill=kill, getpid=os.getpid))
    watchdog = stock.SubprocessWatchdog([child], ["scheduler_0"], interval=0.02)
    watch_schedulers(watchdog)
    watchdog.start()
    assert not ended.wait(0.2), "nobody has died"
    rank.kill()
    assert ended.wait(30) and child.is_alive()
    watchdog.stop()
    assert signals == [(os.getpid(), signal.SIGQUIT)] and f"sglang::scheduler_DP0 (pid={rank.pid})" in caplog.text


@pytest.mark.parametrize(("enabled", "waits"), [(None, False), ("0", False), ("1", True)])
def test_the_server_waits_for_a_core_dump_if_one_can_come(enabled, waits, monkeypatch):
    with envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH.override(True):
        monkeypatch.delenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", raising=False)
        if enabled is not None:
            monkeypatch.setenv("CUDA_ENABLE_USER_TRIGGERED_COREDUMP", enabled)
        skip_impossible_dump(None)
        assert envs.SGLANG_CUDA_COREDUMP_BEFORE_CRASH.get() == waits

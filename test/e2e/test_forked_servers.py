"""Servers that are forked instead of started as commands: forks behave as the commands would.

`timeit` runs the code it is given once, and no server imports it. `os._exit` is used because an interpreter that has
imported SGLang takes seconds to end.
"""

import os
import signal
from collections import OrderedDict

import psutil
import pytest

from sglang_lazy.testing import ServerError, running_server
from sglang_lazy.testing.server import wait_for
from support import forks
from support.forks import start
from support.template import NUM_SPARES

pytestmark = [
    pytest.mark.skipif(not forks.FORKS, reason="nothing is forked with a GPU, or where LAZY_FORKS=0 forbids it"),
    pytest.mark.slow,
    pytest.mark.nightly,  # servers of all other tests are such forks
]


@pytest.fixture(scope="module", autouse=True)
def variable():
    """An environment variable that SGLang reads on import. The template of other tests stays for those that follow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "true")
        patch.setattr(forks, "_templates", OrderedDict())
        yield


@pytest.fixture
def run(tmp_path):
    """run(program, **environment): run a program in a fork."""

    def run(program, **environment):
        with open(tmp_path / "output", "w+") as output:
            arguments = ["-n", "1", "-r", "1", program]
            process = start("timeit", arguments, environment=environment, source=None, output=output)
            process.wait()
            output.seek(0)
            return process, output.read()

    return run


def test_a_fork_is_a_process_of_its_own(run):
    """It has its own session and exit status. SGLang is imported, under the current environment variables."""
    told = "os.getpid(), os.getsid(0), sys.modules['sglang.srt.managers.scheduler'].TEST_RETRACT"
    process, printed = run(f"import os, sys; print({told}, flush=True); os._exit(3)")
    assert printed.split() == [str(process.pid), str(process.pid), "True"]
    assert process.poll() == 3
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGTERM)")[0].returncode == -signal.SIGTERM


def test_a_fork_inherits_no_open_log(run):
    """Closed by a fork that configures logging, it would take along the socket that has its number by then."""
    _, printed = run("import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in range(3, 64)], flush=True)")
    assert printed.startswith("[") and ".log" not in printed


def test_a_fork_spawns_forks_and_then_interpreters(run, tmp_path):
    """All but the last have SGLang at once; all are the fork's children, with its variables and pipes."""
    told = "import os, sys; sender.send((os.getpid(), os.getppid(), os.environ['LATE'], 'sglang' in sys.modules))"
    program = f"""
import multiprocessing, os
spawn = multiprocessing.get_context("spawn")
os.environ["LATE"] = "yes"
for _ in range({NUM_SPARES + 1}):
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=exec, args=({told!r} + "; os._exit(5)", dict(sender=sender)))
    child.start()
    pid, *others = receiver.recv()
    child.join()
    print(pid == child.pid, *others, child.exitcode, flush=True)
os._exit(0)
"""
    process, printed = run(program)
    lines = [line for line in printed.splitlines() if line.startswith("True")]
    assert lines == [f"True {process.pid} yes {imported} 5" for imported in [True] * NUM_SPARES + [False]], printed


def test_a_server_that_does_not_start_is_reported(tmp_path):
    with pytest.raises(ServerError, match="exited with status 2"), running_server([], tmp_path / "log"):
        raise AssertionError("it has no model")
    assert "--model-path" in (tmp_path / "log").read_text()


def test_forks_end_with_the_process_that_asked_for_them(tmp_path):
    """Even if it is killed: their template, which is not its child, then kills them."""
    with open(tmp_path / "output", "w") as output:
        process = start("timeit", ["import time; time.sleep(600)"], environment={}, source=None, output=output)
    template = forks._templates.popitem()[1]
    asked = os.fork()
    if not asked:
        signal.pause()  # with the only open sockets to the template
    template.stock.close()
    template.ours.close()
    fork = psutil.Process(process.pid)
    assert fork.is_running()
    os.kill(asked, signal.SIGKILL)
    os.waitpid(asked, 0)
    assert wait_for(lambda: not fork.is_running() or fork.status() == psutil.STATUS_ZOMBIE)

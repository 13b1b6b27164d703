"""Ways to start a server: the local runtime of the frontend language, and the command."""

import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
import requests
import torch

from fakes import dead_hook
from sglang_lazy import launch_server
from sglang_lazy.testing.processes import start
from sglang_lazy.testing.server import device_flags, free_ports


def printed(module, *arguments, status, environment=None):
    """What a module printed that ended with this status."""
    with tempfile.TemporaryFile("w+") as output:
        process = start(module, arguments, environment=environment or {}, source=None, output=output)
        ended = process.wait()
        output.seek(0)
        shown = output.read()
    assert ended == status, shown
    return shown


@pytest.mark.slow
def test_local_runtime(tiny_model):
    """In a fork, whose server is a fork as well; it installs the plugin itself."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    printed("local_runtime", tiny_model, status=0, environment={"PYTHONPATH": path})


ENDING = """
import multiprocessing, os
from sglang.srt.utils import kill_process_tree
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port import plugin

plugin.activate(LazyConfig())
spawn = multiprocessing.get_context("spawn")
ours, ready = spawn.Semaphore(), spawn.Event()
code = "import multiprocessing, time; theirs = multiprocessing.Semaphore(); ready.set(); time.sleep(600)"
spawn.Process(target=exec, args=(code, dict(ready=ready)), daemon=True).start()
ready.wait()
kill_process_tree(os.getpid(), include_parent=False, wait_timeout=60)
print("ended")
"""


@pytest.mark.slow
def test_processes_that_an_engine_kills_leave_no_trace():
    """As `verify` and `precompute` end. Both processes have a semaphore that Python's resource tracker knows."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and ended.stdout == "ended\n" and "resource_tracker" not in ended.stderr, ended.stderr


# The command


def test_help_is_ours_on_one_screen_and_help_all_has_both_kinds_of_flags(capsys):
    """In this process, which has imported SGLang already."""
    for flag, sglangs in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit) as ended:
            launch_server.main([flag])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "--lazy-max-chunks" in shown and ("--schedule-policy" in shown) == sglangs
        assert (len(shown.splitlines()) < 40) != sglangs


SGLANG_SERVE = ["-c", "from sglang.cli.main import main; main()", "serve", "--model-type", "lazy-here"]
SGLANG_LAZY_SERVE = ["-m", "sglang_lazy", "serve", "--model-path"]
"""Commands that a model and flags follow."""


# By day, test/unit/test_commands.py shows which module `sglang-lazy serve` runs, and test_readme.py runs that one.
@pytest.fixture(
    params=[
        pytest.param(SGLANG_SERVE, id="sglang serve"),
        pytest.param(SGLANG_LAZY_SERVE, id="sglang-lazy serve", marks=pytest.mark.nightly),
    ]
)
def serve(request, tmp_path):
    """The commands of other names; our backend of `sglang serve` is installed under a name of its own."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "backend-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: backend\nVersion: 1\n")
    entry = f"lazy-here = {project['entry-points']['sglang.serve_backends']['lazy']}"
    (metadata / "entry_points.txt").write_text(f"[sglang.serve_backends]\n{entry}\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))

    def serve(*flags):
        log = open(tmp_path / "server.log", "w+")  # noqa: SIM115 (open as long as the process)
        command = [sys.executable, *request.param, *flags]
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path}), log

    return serve


@pytest.mark.slow
def test_serve_says_which_flag_is_wrong(serve):
    process, log = serve("m", "--lazy-max-chunks", "0")
    assert process.wait(timeout=300) == 2
    log.seek(0)
    assert "argument --lazy-max-chunks: must be at least 1" in log.read()


@pytest.mark.slow
def test_serve_serves_chunks(serve, tiny_model):
    port, nccl_port = free_ports(2)
    flags = ["--port", str(port), "--nccl-port", str(nccl_port), "--lazy-max-chunks", "5", *device_flags()]
    process, log = serve(tiny_model, "--max-total-tokens", "4000", *flags)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 300
    try:
        while not _answers(f"{url}/health"):
            log.seek(0)
            assert process.poll() is None and time.monotonic() < end, log.read()[-4000:]
            time.sleep(0.5)
        assert requests.get(f"{url}/lazy_info", timeout=60).json()["config"]["max_chunks"] == 5
        body = {"segments": ["Read: ", {"type": "chunk", "text": "a river"}, "Who?"], "sampling_params": {"n": 1}}
        answer = requests.post(f"{url}/generate", json=body, timeout=60)
        assert answer.ok and len(answer.json()["meta_info"]["chunks"]) == 1, answer.text
    finally:
        process.terminate()
        process.wait(timeout=120)


def _answers(url):
    try:
        return requests.get(url, timeout=5).ok
    except requests.RequestException:
        return False


def refused(*flags, status):
    """What the command printed before it gave up."""
    return printed("sglang_lazy.launch_server", *flags, status=status)


COMMANDS = [
    ("launch_server", ["--lazy-max-chunks", "0"], "argument --lazy-max-chunks: must be at least 1"),
    ("verify", ["--min-agreement", "2"], "argument --min-agreement: must be at least 0 and at most 1, got 2.0"),
    ("verify", ["--", "--lazy-max-chunks", "0"], "argument --lazy-max-chunks: must be at least 1"),
    (
        "precompute",
        ["--", "--hicache-storage-backend", "file", "--lazy-chunk-pool=1"],
        "argument --lazy-chunk-pool: must be above 0 and below 1",
    ),
    ("bench", ["--count", "0"], "argument --count: must be a number of at least 1"),
    ("bench", ["--", "--lazy-max-chunks", "0"], "argument --lazy-max-chunks: must be at least 1"),
    ("routing", ["--capacity", "0"], "argument --capacity: must be a number of at least 1"),
]
REQUIRED = {
    "bench": ["--model-path", "m"],
    "verify": ["--model-path", "m", "--prompts", "nowhere"],
    "precompute": ["--model-path", "m", "--chunks", "nowhere"],
    "routing": ["--router", "http://127.0.0.1:9"],
}


@pytest.mark.parametrize("module, flags, reason", COMMANDS)
def test_bad_flags_end_a_command_before_it_imports_sglang(module, flags, reason):
    """Nor does it import PyTorch. As users start it: a fork has both."""
    command = [sys.executable, "-X", "importtime", "-m", f"sglang_lazy.{module}", *REQUIRED.get(module, []), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and reason in ended.stderr, ended.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines() if "import time:" in line}
    assert "argparse" in imported and not imported & {"torch", "sglang"}


def test_a_flag_of_sglangs_that_is_wrong_is_named_without_all_others():
    shown = refused("--model-path", "m", "--tp-sizzle", "2", status=2)
    assert "error: unrecognized arguments: --tp-sizzle 2" in shown and "--schedule-policy" not in shown


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may support them")
def test_kernels_that_do_not_fit_are_refused_before_the_model_is_loaded(tiny_model):
    shown = refused("--model-path", tiny_model, "--device", "cpu", "--lazy-kernels", "cuda", status=1)
    assert "--lazy-kernels cuda: the kernels need a Hopper GPU" in shown and "Load weight" not in shown


@pytest.mark.slow
@pytest.mark.parametrize("warm_up", [[], pytest.param(["--skip-server-warmup"], marks=pytest.mark.nightly)])
def test_a_server_does_not_get_up_with_a_hook_that_never_runs(tiny_model, with_plugin, warm_up):
    """Found by the self-test, which needs no warm-up of SGLang's."""
    flags = ["--model-path", tiny_model, *device_flags(), "--max-total-tokens", "1000", *warm_up]
    with with_plugin(dead_hook.load):
        shown = refused(*flags, "--port", str(free_ports(1)[0]), status=3)
    assert f"sglang-lazy cannot serve: SGLang does not call what these hooks are on: ['{dead_hook.TARGET}']" in shown
    assert "ready to roll" not in shown

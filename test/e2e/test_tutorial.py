"""docs/tutorial.md: its commands and programs, as printed but for the port, print what it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_lazy.testing import running_server
from sglang_lazy.testing.server import wait_for
from support.pages import ROOT, fenced, pattern, read, run_python

pytestmark = pytest.mark.slow

BLOCKS = fenced(read("docs/tutorial.md"))
PRINTED = "http://127.0.0.1:30000"


def run_shell(command: str) -> str:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    ).stdout


@pytest.fixture
def tutorial(tmp_path, monkeypatch):
    """The URL and the log of the server that the page's first command starts."""
    monkeypatch.chdir(ROOT)
    (kind, command), *_ = BLOCKS
    words = shlex.split(command.replace("\\\n", ""))
    assert (kind, words[:3]) == ("bash", ["python", "-m", "sglang_lazy.launch_server"])
    flags = words[3:]
    port = flags.index("--port")
    assert flags[port : port + 2] == ["--port", PRINTED.rpartition(":")[2]]
    del flags[port : port + 2]
    log = tmp_path / "server.log"
    with running_server([*flags, "--sleep-on-idle"], log) as url:
        yield url, log


def test_it_prints_what_the_page_shows(tutorial):
    url, log = tutorial
    names: dict = {}
    printed = ""
    for kind, block in BLOCKS[1:]:
        if kind == "text":
            assert re.fullmatch(pattern(block), printed.strip()), f"expected\n{block}\nprinted\n{printed}"
        elif kind == "log":
            wait_for(lambda block=block: re.search(pattern(block), log.read_text(encoding="utf-8")))
            assert re.search(pattern(block), log.read_text(encoding="utf-8")), block
        else:
            program = block.replace(PRINTED, url)
            printed = run_python(program, names) if kind == "python" else run_shell(program)
            assert printed or "print" not in block


def test_all_that_programs_print_is_on_the_page():
    kinds = [kind for kind, _ in BLOCKS]
    assert kinds.count("python") > 8 and kinds.count("text") > 7 and kinds.count("log") == 3
    assert set(kinds) == {"python", "bash", "text", "log"}

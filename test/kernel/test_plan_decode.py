"""The planner of the CUDA decode kernel, run on the host: every KV token is read exactly once, and blocks finish
together."""

import pathlib
import shutil
import subprocess

import pytest

import sgl_kernel_lazy

HERE = pathlib.Path(__file__).parent / "host_cuda"
CSRC = pathlib.Path(sgl_kernel_lazy.__file__).parent / "csrc"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the planner for the host")
def test_every_kv_token_is_read_once(tmp_path):
    """Shared and private chunks, pieces of any length, more sharing than fits, and padding rows."""
    program = tmp_path / "plan_decode"
    command = ["g++", "-std=c++20", "-O1", f"-I{HERE}", f"-I{CSRC}", str(HERE / "plan_decode.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([str(program), "0", "100"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

"""The plan of the CUDA prefill kernel, run on the host: every row tile and split once, and blocks end together."""

import pathlib
import shutil
import subprocess

import pytest

import sgl_kernel_lazy

HERE = pathlib.Path(__file__).parent / "host_cuda"
CSRC = pathlib.Path(sgl_kernel_lazy.__file__).parent / "csrc"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the plan for the host")
def test_every_row_tile_and_split_once(tmp_path):
    """Batches alike and unlike, of up to 70 requests; partial results have their own place, which the merge finds."""
    program = tmp_path / "plan_extend"
    command = ["g++", "-std=c++20", "-O1", f"-I{HERE / 'warp'}", f"-I{CSRC}", str(HERE / "plan_extend.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([str(program), "0", "40"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

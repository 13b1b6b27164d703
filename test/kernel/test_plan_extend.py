"""The plan of the CUDA prefill kernel, its runs and the merge of its splits, on the host."""

import pathlib
import shutil
import subprocess

import pytest

import sgl_kernel_lazy

HERE = pathlib.Path(__file__).parent / "host_cuda"
CSRC = pathlib.Path(sgl_kernel_lazy.__file__).parent / "csrc"


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles the code for the host")
@pytest.mark.parametrize("name", ["plan_extend", "extend_runs", "merge_splits"])
def test_on_the_host(name, tmp_path):
    """plan_extend: every row tile and split belongs to exactly one block, partial results do not overlap, and blocks
    finish together. Dividing by a number known in advance gives what the machine's division gives.

    extend_runs: what rows see is listed once, whatever the windows and splits, and unmasked tiles hide nothing from a
    row.
    merge_splits: against float64, with splits that saw nothing.
    """
    program = tmp_path / name
    command = ["g++", "-std=c++20", "-O1", f"-I{HERE / 'warp'}", f"-I{CSRC}", str(HERE / f"{name}.cpp")]
    subprocess.run([*command, "-o", str(program)], check=True)
    done = subprocess.run([str(program), "0", "40"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

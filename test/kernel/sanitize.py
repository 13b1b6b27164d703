"""Run compute-sanitizer over the CUDA kernels on ragged batches, small and large; needs a Hopper GPU.

    python test/kernel/sanitize.py [--sanitizer PATH] [--tools racecheck] [--batches large]

racecheck must first find the race in a broken ring of mbarriers and none in a correct one, see sanitizer_control.cu. If
one lane arrives for its warp, as in the kernels, version 2026.4.0 reports hazards in correct rings too. So racecheck
checks a build in which every lane arrives (LAZY_EVERY_LANE_ARRIVES, in a workspace of its own), and its result counts
only if it distinguishes such rings. That build cannot show whether a warp's other lanes have finished when one lane
arrives for them. The other tools check the ordinary build.

racecheck counts the mbarriers in the source, an array as one, and reports false hazards if a block has more:
--num-cuda-barriers gives the number. The tool comes with the CUDA toolkit and as nvidia-cuda-sanitizer-api on PyPI;
releases before 13.1 are known to misreport mbarriers.
"""

import argparse
import importlib
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import torch

import sgl_kernel_lazy

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE.parents[1]))

# Behind the line that makes `oracle` importable, which it uses.
from ragged import Shape, add_sinks, check, quantise, random_batch  # noqa: E402

CSRC = pathlib.Path(sgl_kernel_lazy.__file__).parent / "csrc"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
NUM_BARRIERS = 64  # at least as many as any block has; the decode kernel has 24
FOUND = 9  # exit status of the tool if it reports something
EVERY_LANE = "-DLAZY_EVERY_LANE_ARRIVES"
Done = subprocess.CompletedProcess[str]

BF16 = dict(dtype=torch.bfloat16, head_dim=128, rotary_dim=128)
# name: Shape, fp8 type of the caches
BATCHES = {
    "few requests": (Shape(8, 2, **BF16, bs=7, max_segments=12, max_chunk_len=400, max_position=8192), None),
    "many users of a chunk": (Shape(32, 8, **BF16, bs=40, max_segments=9, max_chunk_len=300, max_position=8192), None),
    "interleaved": (
        Shape(12, 4, 128, 128, False, torch.float16, bs=20, max_segments=9, max_chunk_len=300, max_position=8192), None,
    ),
    "one head per kv head": (Shape(16, 16, **BF16, bs=20, max_segments=5, max_chunk_len=200, max_position=8192), None),
    "head_dim 64 in fp8": (
        Shape(8, 4, dtype=torch.bfloat16, bs=20, max_segments=9, max_chunk_len=300, max_position=8192),
        torch.float8_e4m3fn,
    ),
    "head_dim 256": (
        Shape(8, 2, 256, 64, dtype=torch.bfloat16, bs=10, max_segments=5, max_chunk_len=200, max_position=8192), None,
    ),
    "large": (Shape(32, 8, **BF16, bs=128, max_segments=20, max_chunk_len=700, max_position=32768), None),
}  # fmt: skip


def run_batches(names: list[str]) -> None:
    """Run both ops on these batches, and prefill under a short and a long window with sinks; each is checked against
    the formula."""
    for name in names:
        shape, fp8 = BATCHES[name]
        for op in ("decode", "extend"):
            batch = random_batch(0, shape)
            module = importlib.import_module(f"sgl_kernel_lazy.cuda.link_{op}")
            given = quantise(batch, fp8) if fp8 else {}
            check(op, module, batch, **given)
            for window in (100, 500) if op == "extend" else ():
                add_sinks(batch).options["window"] = window
                check(op, module, batch, **given)


def sanitized(sanitizer: str, tool: str, *command: str, env: dict[str, str] | None = None) -> Done:
    """The command under a tool, restricted to our kernels."""
    options = ["--tool", tool, "--kernel-name", "kernel_substring=lazy"]
    if tool in ("racecheck", "synccheck"):
        options += ["--num-cuda-barriers", str(NUM_BARRIERS)]
    options += ["--error-exitcode", str(FOUND)]
    return subprocess.run([sanitizer, *options, *command], env=env, capture_output=True, text=True)


def print_report(done: Done) -> None:
    """Print the end of the tool's report, which is on stdout."""
    print((done.stderr + done.stdout)[-4000:])


def distinguishes_rings(sanitizer: str, folder: str) -> bool:
    """Whether racecheck finds the race in the broken ring and none in the correct one, with every lane arriving."""
    distinguished = dict.fromkeys(("one lane arrives", "every lane arrives"), True)
    for arrival, ring in itertools.product(distinguished, ("right", "broken")):
        flags = [EVERY_LANE] * (arrival == "every lane arrives") + ["-DBROKEN"] * (ring == "broken")
        source, program = str(HERE / "sanitizer_control.cu"), f"{folder}/control"
        nvcc = ["nvcc", "-std=c++17", "-O3", "-lineinfo", "-arch=sm_90a", f"-I{CSRC}", source, *flags]
        subprocess.run([*nvcc, "-o", program], check=True)
        done = sanitized(sanitizer, "racecheck", program)
        outcome = {0: "nothing reported", FOUND: "reported"}.get(done.returncode, f"exit status {done.returncode}")
        print(f"control, {arrival}, {ring} ring: {outcome}")
        if done.returncode != (FOUND if ring == "broken" else 0):
            distinguished[arrival] = False
            print_report(done)
    return distinguished["every lane arrives"]


def passes(sanitizer: str, tool: str, names: list[str], folder: str) -> bool:
    """Whether the tool reports nothing about the kernels on these batches, and can be relied upon."""
    env = os.environ | {"FLASHINFER_JIT_LINEINFO": "1"}
    passed = True
    if tool == "racecheck":
        passed = distinguishes_rings(sanitizer, folder)
        if not passed:
            print("racecheck does not distinguish the rings: its reports on the kernels mean nothing")
        flags = os.environ.get("FLASHINFER_EXTRA_CUDAFLAGS", "")
        env |= {"FLASHINFER_WORKSPACE_BASE": folder, "FLASHINFER_EXTRA_CUDAFLAGS": f"{flags} {EVERY_LANE}"}
    program = [sys.executable, __file__, "--run", "--batches"]
    subprocess.run([*program, ",".join(names)], env=env, check=True)  # compiles the kernels and checks their results
    for name in names:
        begin = time.perf_counter()
        done = sanitized(sanitizer, tool, *program, name, env=env)
        passed &= done.returncode == 0
        print(f"{tool}, {name}: {'FAILED' if done.returncode else 'clean'}, {time.perf_counter() - begin:.0f} s")
        if done.returncode:
            print_report(done)
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="path of the tool")
    parser.add_argument("--tools", default="memcheck,racecheck", help=f"some of {','.join(TOOLS)}")
    parser.add_argument("--batches", default=",".join(BATCHES), help=f"some of {','.join(BATCHES)}")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)  # the program under the tool
    given = parser.parse_args()
    names = given.batches.split(",")
    if given.run:
        run_batches(names)
        return 0
    print(subprocess.run([given.sanitizer, "--version"], capture_output=True, text=True).stdout.strip())
    with tempfile.TemporaryDirectory() as folder:
        passed = [passes(given.sanitizer, tool, names, folder) for tool in given.tools.split(",")]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())

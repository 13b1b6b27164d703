"""The facts needed to judge or repeat a measurement: machine, versions, commit, command, seed."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch


def describe_environment(*, commit: str | None, seed: int, server_flags: list[str]) -> dict:
    """commit: recorded instead of git's, for a machine whose copy of the tree has no git."""
    gpu = torch.cuda.is_available()
    power = ["nvidia-smi", "--id=0", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]  # all alike
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores",
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver, power limit": _output(power) if gpu else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("sglang", "torch", "triton", "flashinfer-python")},
        "commit": commit or _git_commit(),
        "command": _command(),
        "variables": {name: value for name, value in os.environ.items() if name.startswith("SGLANG_")},
        "server_flags": shlex.join(server_flags),
        "seed": seed,
    }


def _command() -> str:
    """The command line that repeats this run from the repository's root, without this machine's paths."""
    module = sys.modules["__main__"].__spec__  # None for a program that was not started with `python -m`
    program = ["python", "-m", module.name.removesuffix(".__main__")] if module else sys.argv[:1]
    return shlex.join([*program, *sys.argv[1:]])


def version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git_commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = _output([*git, "rev-parse", "HEAD"])
    if not commit:
        return "unknown"
    return (
        f"{commit} and changes not committed"
        if _output([*git, "status", "--porcelain", "--untracked-files=no"])
        else commit
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # the program is not installed
        return ""

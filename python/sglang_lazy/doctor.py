"""Command: what this machine and these flags would serve, and what they refuse, without weights.

Takes the flags of `sglang_lazy.launch_server` and runs the checks that a server runs before it
loads its model. Layers and angles are checked only once the model is loaded.

Exit status: 0 if a server would load the model, 1 if it would refuse, 2 if a flag is invalid.
"""

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
import warnings
from collections.abc import Sequence

import torch

from sgl_kernel_lazy.cuda import jit
from sglang_lazy.core.help import Help
from sglang_lazy.launch_server import activate, checked_args, parse_args

PROG = "python -m sglang_lazy.doctor"


def machine() -> list[str]:
    """What is installed, and which kernels each GPU would run."""
    packages = {name: importlib.metadata.version(name) for name in ("sglang", "torch", "transformers")}
    lines = [f"python {platform.python_version()}, " + ", ".join(" ".join(each) for each in packages.items())]
    for index in range(torch.cuda.device_count()):
        device, memory = torch.device("cuda", index), torch.cuda.get_device_properties(index).total_memory
        lacks = jit.missing(device)
        lines.append(f"GPU {index}: {torch.cuda.get_device_name(index)}, {memory / 2**30:.0f} GiB, {_kernels(lacks)}")
    return lines if len(lines) > 1 else [*lines, "no GPU: PyTorch kernels; serve with --device cpu"]


def _kernels(lacks: str | None) -> str:
    return "CUDA kernels" if lacks is None else f"Triton kernels ({lacks})"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the machine, and what the flags would lead to; exit with the verdict."""
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"}.intersection(argv):
        parser = argparse.ArgumentParser(
            PROG,
            "%(prog)s [--model-path MODEL] [flags of a server]",
            __doc__,
            formatter_class=Help,
        )
        parser.parse_args(["--help"])
    config, rest = parse_args(argv, PROG)
    print("\n".join(machine()), flush=True)
    warnings.filterwarnings("ignore", module=r"sglang\.")  # of what other machines have
    try:
        parser = activate(config, PROG)
        if not parser.parse_args(["--model-path", "", *rest]).model_path:
            print("No model was named: with --model-path, its configuration and your flags are checked, too.")
            return
        checked_args(config, rest, parser)
    except (RuntimeError, ValueError) as error:
        print(f"refused: {error}")
        sys.exit(1)
    print("fit: a server with these flags would load the model, and then check its layers")


if __name__ == "__main__":
    main()

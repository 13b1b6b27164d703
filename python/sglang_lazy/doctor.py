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
import traceback
import warnings
from collections.abc import Sequence

import torch

from sgl_kernel_lazy.cuda import jit
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.help import Help
from sglang_lazy.launch_server import parse_args, sglangs_parser

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


def refusals(config: LazyConfig, rest: Sequence[str]) -> str | None:
    """What a server with these flags would say before it ends, or None if it would load the model.

    rest: the flags for SGLang.
    """
    from sglang_lazy.port import plugin

    warnings.filterwarnings("ignore", module=r"sglang\.")  # of what other machines have
    try:
        plugin.activate(config)
    except RuntimeError as error:
        return str(error)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_lazy.port.flag_checks import check_start

    load_plugins()
    sglangs_parser(PROG).parse_args(rest)
    try:
        server_args = prepare_server_args(list(rest))
        check_start(config, server_args)
    # SGLang raises any of these for flags, a machine or a model that do not fit; OSError if the model is not there.
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        return str(error) or f"SGLang has not explained: {traceback.extract_tb(error.__traceback__)[-1].line}"
    return None


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
    print("\n".join(machine()))
    if not any(flag.partition("=")[0] in ("--model-path", "--model", "--config") for flag in rest):
        print("No model was named: with --model-path, its configuration and your flags are checked, too.")
        return
    if (refused := refusals(config, rest)) is not None:
        print(f"refused: {refused}")
        sys.exit(1)
    print("fit: a server with these flags would load the model, and then check its layers")


if __name__ == "__main__":
    main()

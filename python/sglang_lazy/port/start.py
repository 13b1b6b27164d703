"""Before SGLang starts: flags from a configuration file, and checks that do not need the model."""

import argparse
from collections.abc import Sequence

import torch
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from sgl_kernel_lazy.cuda import jit
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.cpu import unfit_for_cpu
from sglang_lazy.port.model.compat import Unfit, unfit_flags


def merge_config_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """`argv` and the flags of `parser` that are set in the file named by --config."""
    return ConfigArgumentMerger(parser).merge_config_with_args(list(argv))


def check_start(config: LazyConfig, args: ServerArgs) -> None:
    """Raise Unfit if SGLang's flags or this machine do not allow chunk reuse, unless `config` has the fallback.

    Raises ValueError, in any case, for flags under which SGLang could not serve.
    """
    if reason := unfit_for_cpu(args):
        raise ValueError(reason)
    if not config.fallback and (reasons := unfit_flags(args) + _unfit_kernels(config, args)):
        raise Unfit(reasons)


def _unfit_kernels(config: LazyConfig, args: ServerArgs) -> list[str]:
    reason = jit.missing(torch.device(args.device)) if config.kernels == "cuda" else None
    return [f"--lazy-kernels cuda: {reason}"] if reason else []

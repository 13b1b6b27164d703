"""Helpers for commands that start an engine, whose flags follow after --."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sglang_lazy.core.config import LazyConfig


class EngineFlags(NamedTuple):
    """Our configuration, and the flags for SGLang."""

    config: LazyConfig
    rest: list[str]


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """A command's own arguments, and those after -- for its engine. Exits if one of its own is invalid."""
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    args, unknown = parser.parse_known_args(argv[:split])
    if unknown:
        typed = " ".join(unknown)
        parser.error(f"unrecognized arguments: {typed} (flags of the engine follow after --, as in: -- {typed})")
    return args, argv[split + 1 :]


def engine_flags(
    parser: argparse.ArgumentParser, model_path: str, flags: Sequence[str], policies: Sequence[str] = ()
) -> EngineFlags:
    """The flags of an engine, which are those of `sglang_lazy.launch_server`. Exits if one of ours is invalid.

    policies: what --policies names; exits if one does not exist.
    """
    from sglang_lazy.launch_server import parse_args

    for policy in policies:
        from sglang_lazy.policies import check_policy  # imports PyTorch

        try:
            check_policy(policy)
        except ValueError as error:
            parser.error(f"--policies: {error}")
    return EngineFlags(*parse_args(["--model-path", model_path, "--log-level", "error", *flags], parser.prog))


@contextlib.contextmanager
def started(flags: EngineFlags, policies: Sequence[str] = ()) -> Iterator[Any]:
    """An engine. Raises ValueError, before the model is loaded, if one of `policies` does not exist."""
    from sglang_lazy.port import plugin

    plugin.activate(flags.config)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_lazy.entrypoints.engine import Engine
    from sglang_lazy.policies import get_policy

    load_plugins()
    for policy in policies:
        get_policy(policy)  # which a plugin of SGLang's may have added
    options = {f"lazy_{name}": value for name, value in dataclasses.asdict(flags.config).items()}
    with Engine(server_args=prepare_server_args(flags.rest), **options) as engine:
        yield engine

"""Helpers for commands that start an engine, whose flags follow after --."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any


def cut(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command's arguments at --, into its own and those for its engine."""
    argv = list(argv)
    split = argv.index("--") if "--" in argv else len(argv)
    return argv[:split], argv[split + 1 :]


@contextlib.contextmanager
def started(model_path: str, flags: Sequence[str], policies: Sequence[str] = ()) -> Iterator[Any]:
    """An engine with the flags of `sglang_lazy.launch_server`.

    Raises ValueError, before the model is loaded, if one of `policies` does not exist.
    """
    from sglang_lazy.launch_server import parse_args as parse_server_args
    from sglang_lazy.policies import get_policy
    from sglang_lazy.port import plugin

    config, rest = parse_server_args(["--model-path", model_path, "--log-level", "error", *flags])
    plugin.activate(config)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from sglang_lazy.entrypoints.engine import Engine

    load_plugins()
    for policy in policies:
        get_policy(policy)  # which a plugin of SGLang's may have added
    options = {f"lazy_{name}": value for name, value in dataclasses.asdict(config).items()}
    with Engine(server_args=prepare_server_args(rest), **options) as engine:
        yield engine

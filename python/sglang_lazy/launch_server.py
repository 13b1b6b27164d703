"""Command: SGLang's server with chunk reuse. Takes every flag of `sglang serve` and our own.

`sglang serve --model-type lazy` is the same command, through the entry point `serve_backend`.
"""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from sglang_lazy.core.config import LazyConfig, add_cli_args, flag, from_cli_args
from sglang_lazy.core.help import FirstSentences
from sglang_lazy.port import plugin

# Processes that SGLang spawns import this module before any of SGLang's, and SGLang does not load plugins in all of
# them. In the process that the user starts there is no configuration yet: `main` activates the plugin.
plugin.load()


PROG = "python -m sglang_lazy.launch_server"
_USAGE = "%(prog)s [flags]; --help lists ours, --help-all SGLang's as well"
_SGLANGS = """Of SGLang's flags, first --model-path MODEL, --port PORT, --tp-size N, --admin-api-key KEY;
--enable-cache-report and --enable-metrics count reuse; --device cpu serves without a GPU."""


def parse_args(argv: Sequence[str], prog: str = PROG) -> tuple[LazyConfig, list[str]]:
    """Our configuration, and the remaining flags, for SGLang. Exits if one of ours is invalid, and on --help and
    --help-all.

    prog: the command that errors name.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        usage=_USAGE,
        description=_SGLANGS,
        formatter_class=FirstSentences,
    )
    add_cli_args(parser)
    args, rest = _ours(parser, argv)
    if {"-h", "--help"}.intersection(argv):
        parser.print_help()
        parser.exit()
    if {"--help-all", "--config"}.intersection(argv):  # imports SGLang, so only now
        args, rest = _ours(parser, _expand(argv))
    from sglang_lazy.policies import check_policy  # imports PyTorch

    try:
        config = from_cli_args(args)
    except ValueError as error:
        parser.error(str(error))
    try:
        check_policy(config.default_link)
    except ValueError as error:
        parser.error(f"{flag('default_link')}: {error}")
    return config, rest


def _ours(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the arguments that are none. Exits if one of ours is invalid or only looks like ours."""
    args, rest = parser.parse_known_args(argv)
    for argument in rest:
        if argument.startswith("--lazy-"):
            names = ["--" + name.replace("_", "-") for name in vars(args)]
            similar = difflib.get_close_matches(argument.partition("=")[0], names, n=1)
            parser.error(f"unknown flag {argument}" + "".join(f": did you mean {name}?" for name in similar))
    return args, rest


def _expand(argv: Sequence[str]) -> Sequence[str]:
    """`argv` with the flags that a --config file sets, including ours. Exits on --help-all."""
    from sglang.srt.server_args import ServerArgs

    from sglang_lazy.port.flag_checks import merge_config_file

    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    ServerArgs.add_cli_args(parser)
    add_cli_args(parser)
    if "--config" in argv:
        argv = merge_config_file(parser, argv)
    if "--help-all" in argv:
        parser.print_help()
        parser.exit()
    return argv


def activate(config: LazyConfig, prog: str = PROG) -> argparse.ArgumentParser:
    """Activate the plugin. Returns a parser of SGLang's flags, whose errors take a line: SGLang's own prints five
    hundred first. Raises RuntimeError for another SGLang than the plugin's.

    prog: the command that errors name.
    """
    plugin.activate(config)

    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog=prog, usage=_USAGE)
    ServerArgs.add_cli_args(parser)
    return parser


def checked_args(config: LazyConfig, rest: Sequence[str], parser: argparse.ArgumentParser) -> Any:
    """SGLang's `ServerArgs`, checked as far as that goes without the model's weights.

    rest: the flags for SGLang.  parser: of `activate`. Exits if a flag is invalid. Raises ValueError if a server with
    these flags cannot start, with the reason.
    """
    from sglang.srt.server_args import prepare_server_args

    from sglang_lazy.policies import get_policy
    from sglang_lazy.port.flag_checks import check_start

    parser.parse_args(rest)
    try:
        get_policy(config.default_link)  # a plugin of SGLang's may have added it
    except ValueError as error:
        parser.error(f"{flag('default_link')}: {error}")
    try:
        server_args = prepare_server_args(list(rest))
        check_start(config, server_args)
    # SGLang raises any of these for flags, a machine or a model that do not fit; OSError if the model is not there.
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        raise ValueError(str(error) or f"SGLang has not explained: {line}") from error
    return server_args


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server and serve until it is stopped."""
    config, rest = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        server_args = checked_args(config, rest, activate(config))
    except (RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")

    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def serve_backend() -> Any:
    """The backend `lazy` of `sglang serve`."""
    from sglang.cli.serve_backends import ServeBackend

    return ServeBackend(api_version=1, run=_become_command, requires_model_path=False)  # a --config may have it


def _become_command(call: Any) -> None:
    """Replace this process, which has imported SGLang already, and whose children would do so without the plugin."""
    os.execv(sys.executable, [sys.executable, "-m", "sglang_lazy.launch_server", *call.argv])


if __name__ == "__main__":
    main()

"""Command-line arguments common to the benchmarks of servers."""

import argparse

from benchmark.serving.contenders import CONTENDERS, POLICY, parse_contenders
from benchmark.serving.models import SHAPES, TINY, model_name


def typed(parse):
    """Wrap `parse` for argparse, so that users see the message of its ValueError."""

    def convert(value: str):
        try:
            return parse(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def positive(value: str) -> int:
    """An integer of at least 1."""
    number = int(value)
    if number < 1:
        raise ValueError(f"expected at least 1, got {number}")
    return number


def positive_float(value: str) -> float:
    """A number above 0, infinity included."""
    number = float(value)
    if not number > 0:
        raise ValueError(f"expected more than 0, got {number:g}")
    return number


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--contenders",
        type=typed(parse_contenders),
        default="lazy,stock",
        help=f"comma-separated, of: {', '.join(CONTENDERS)}, {POLICY}POLICY; default: %(default)s",
    )
    parser.add_argument(
        "--model",
        type=typed(model_name),
        default="llama-3.1-8b",
        help=f"{' and '.join(SHAPES)} have random weights; or {TINY}, a path or a hub name; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds to wait for a server")
    parser.add_argument("server_flags", nargs="*", help="flags for every server, after `--`")

"""Command: compare policies for reusing chunks with link full, on your prompts, and recommend one.

It starts the model (--model-path; flags for SGLang and for us follow after --) or queries a running
server (--url). The prompts file has one JSON object per line: segments as in /generate, or docs
(title, text) and question; optionally answers, a list of gold answers.

Exit status: 0 if a policy meets every threshold or none was set, 1 if no policy does, 2 on errors.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_lazy.command import EngineFlags, engine_flags, parse, started
from sglang_lazy.core.config import BadSetting
from sglang_lazy.core.help import parser_of
from sglang_lazy.verify import Report, Thresholds, connect, verify
from sglang_lazy.verify.cases import parse_prompt, read_prompts
from sglang_lazy.verify.policies import parse_policies


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, EngineFlags | None]:
    """Our flags, and those after -- for the engine, if there is to be one. Exits if one is invalid."""
    parser = parser_of("verify", __doc__, "(--model-path M | --url URL) --prompts FILE [options] [-- FLAGS]")
    what = parser.add_argument_group("what to compare")
    where = what.add_mutually_exclusive_group(required=True)
    where.add_argument("--model-path", metavar="MODEL", help="model to start")
    where.add_argument("--url", help="running server, one of sglang_lazy.launch_server")
    what.add_argument("--api-key", metavar="KEY", help="key of the server at --url")
    what.add_argument("--prompts", type=Path, required=True, metavar="FILE", help="JSON Lines file")
    what.add_argument(
        "--policies",
        type=parse_policies,
        metavar="LINK,...",
        help="policies (default: the server's); all: those of docs/verify.md that the server does not refuse",
    )
    what.add_argument("--lora-path", metavar="NAME", help="LoRA adapter, one that the server has loaded")
    what.add_argument("--max-new-tokens", type=int, default=32, metavar="N", help="most tokens of an answer (32)")
    what.add_argument("--stop", action="append", metavar="TEXT", help="ends an answer; may be given several times")
    what.add_argument("--out", type=Path, metavar="FILE", help="the report as JSON, with every prompt's answers")
    limits = parser.add_argument_group("thresholds")
    for field in dataclasses.fields(Thresholds):
        limits.add_argument(_flag(field.name), type=_limit(field.name), metavar="X", help=_HELP[field.name])
    args, flags = parse(parser, argv)
    if args.url and flags:
        parser.error("flags after -- are for an engine started with --model-path")
    if args.model_path and args.api_key:
        parser.error("--api-key goes with --url")
    if args.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    if args.url:
        return args, None
    return args, engine_flags(parser, args.model_path, flags, _named(args))


def _flag(threshold: str) -> str:
    return "--" + threshold.replace("_", "-")


def _limit(name: str) -> Callable[[str], float]:
    """The type of a threshold's flag, for argparse, which names the flag in its errors."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r:.50}") from None
        try:
            Thresholds(**{name: value})
        except BadSetting as error:
            raise argparse.ArgumentTypeError(error.reason) from None
        return value

    return number


def _named(args: argparse.Namespace) -> Sequence[str]:
    """The policies that the command names."""
    return () if args.policies in (None, "all") else args.policies


_HELP = {
    "min_agreement": "least share of identical answers, 0..1",
    "min_first_token_agreement": "least share of identical first tokens, 0..1",
    "max_kl": "largest KL(full || policy) of the first token, mean over the prompts, nats",
    "max_em_drop": "points of exact match (of 100) that a policy may lose",
    "max_f1_drop": "points of F1 (of 100) that a policy may lose",
    "budget_ms": "median milliseconds to the first token with the documents cached",
}


def run(args: argparse.Namespace, flags: EngineFlags | None) -> Report:
    """The report for the command's flags. Raises ValueError if there can be none."""
    thresholds = Thresholds(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Thresholds)})
    prompts = list(read_prompts(args.prompts))
    try:
        thresholds.check([parse_prompt(prompt) for prompt in prompts])  # before a model is started
    except BadSetting as error:
        raise ValueError(f"{_flag(error.name)} {error.reason}") from None
    source = contextlib.nullcontext(None) if flags is None else started(flags, _named(args))
    with source as engine:
        generate = connect(args.url, args.api_key) if engine is None else engine.generate
        if args.lora_path is not None:
            generate = functools.partial(generate, lora_path=args.lora_path)
        return verify(
            generate, prompts, thresholds, policies=args.policies, max_new_tokens=args.max_new_tokens, stop=args.stop
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Print the report, write it to --out, and exit with the verdict."""
    args, flags = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        report = run(args, flags)
        if args.out is not None:
            args.out.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError, RuntimeError) as error:  # the last from an engine that does not start
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(report)
    sys.exit(1 if report.passed is False else 0)


if __name__ == "__main__":
    main()

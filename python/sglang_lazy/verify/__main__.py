"""Command: compare policies for reusing chunks with link full, on your prompts, and recommend one.

It starts the model (--model-path; flags for SGLang and for us follow after --) or queries a running server (--url). The
prompts file has one JSON object per line: segments as in /generate, or docs (title, text) and question; optionally
answers, a list of gold answers.

Exit status: 0 if a policy meets every threshold or none was set, 1 if no policy does, 2 if there is no result.
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
from sglang_lazy.verify import Report, Thresholds, connect, verify
from sglang_lazy.verify.cases import parse_prompt, read_prompts
from sglang_lazy.verify.policies import ALL, parse_policies


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, EngineFlags | None]:
    """Our flags, and those after -- for the engine, if there is to be one. Exits if one is invalid."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_lazy.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s (--model-path PATH | --url URL) --prompts FILE [options] [-- flags of the engine]",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model-path", help="model to start")
    where.add_argument("--url", help="running server, one of sglang_lazy.launch_server")
    parser.add_argument("--api-key", help="key of the server at --url")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON Lines file")
    parser.add_argument(
        "--policies",
        type=parse_policies,
        metavar="LINK,...",
        help="policies to compare (default: the server's default link); all: those that the server does not refuse of "
        + ", ".join(ALL),
    )
    parser.add_argument("--lora-path", metavar="NAME", help="LoRA adapter to answer with, which the server has loaded")
    parser.add_argument("--max-new-tokens", type=int, default=32, help="maximum tokens of an answer (default: 32)")
    parser.add_argument("--stop", action="append", help="text that ends an answer; may be given several times")
    parser.add_argument("--out", type=Path, help="file for the report as JSON, every prompt's answers included")
    for field in dataclasses.fields(Thresholds):
        parser.add_argument(_flag(field.name), type=_limit(field.name), metavar="X", help=_HELP[field.name])
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
    "min_agreement": "minimum share of identical answers, 0..1",
    "min_first_token_agreement": "minimum share of identical first tokens, 0..1",
    "max_kl": "maximum KL(full || policy) of the first token, mean over the prompts, in nats",
    "max_em_drop": "maximum points of exact match (of 100) that a policy may lose",
    "max_f1_drop": "maximum points of F1 (of 100) that a policy may lose",
    "budget_ms": "maximum milliseconds to the first token with the documents cached, median over the prompts",
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

"""Command: how long your prompts wait for their first token, with chunks and without, on your server.

It asks a running server (--url) or one that it starts (--model-path; flags of the server follow
after --). The prompts file has one JSON object per line: segments as in /generate, or docs (title,
text) and question; without one, prompts are made up. Each prompt is sent alone: cold, warm (again),
and reordered (its chunks in another order); at last all, once, as they follow one another in the
file. Link full sends the same prompts without chunks. What was cached before is not used.

Exit status: 0, or 2 without a result.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_lazy.command import engine_flags, parse
from sglang_lazy.core.help import parser_of
from sglang_lazy.verify.cases import parse_prompt, read_prompts
from sglang_lazy.verify.cost import rotate_chunks
from sglang_lazy.verify.policies import split_policies
from sglang_lazy.verify.prompts import retrieval_segments

if TYPE_CHECKING:
    from sglang_lazy.testing import Generation

FULL = "full"
PHASES = ("cold", "warm", "reordered", "in turn")
Segments = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer's first token.

    ttft: seconds on the client's clock.  prompt, reused: tokens of the prompt, and those of them that were cached, as
    chunks or as a prefix.
    """

    phase: str
    link: str
    ttft: float
    prompt: int
    reused: int


@dataclasses.dataclass(frozen=True)
class Row:
    """The samples of a phase under a link. Times in ms; of few samples, `p99` is the largest."""

    phase: str
    link: str
    samples: int
    ttft_ms_p50: float
    ttft_ms_p99: float
    prompt_tokens: int
    reused_tokens: int

    @property
    def reused(self) -> float:
        """Share of the prompt's tokens, 0..1."""
        return self.reused_tokens / self.prompt_tokens


def made_up(prompts: int, chunks: int, words: int) -> list[Segments]:
    """Retrieval prompts, each with distinct documents out of four prompts' worth, in random order.

    A document has this many `words`, of random syllables, so that nothing is reused by accident; each is some tokens.
    """
    rng = random.Random(0)
    syllables = [first + second + third for first in "bdfgklmnprst" for second in "aeiou" for third in "lnrs"]

    def text(count: int) -> str:
        return " ".join("".join(rng.choices(syllables, k=2)) for _ in range(count))

    documents = [{"title": text(2), "text": text(words)} for _ in range(4 * chunks)]
    return [retrieval_segments({"docs": rng.sample(documents, chunks), "question": text(8)}) for _ in range(prompts)]


def measure(ask: Callable[..., "Generation"], prompts: Sequence[Segments], links: Sequence[str]) -> Iterator[Sample]:
    """Send all prompts under all links, one at a time, from caches of their own.

    ask: sends `segments` with a `link` and a `cache_salt`. Links take turns prompt by prompt, and each begins in
    its turn, so that what else happens on the machine meets all alike.
    """
    run = uuid.uuid4().hex
    orders = [[*links[number % len(links) :], *links[: number % len(links)]] for number in range(len(prompts))]

    def sample(phase: str, link: str, salt: str, segments: Segments) -> Sample:
        answer = ask(segments=segments, link=link, cache_salt=f"bench-{run}-{salt}-{link}")
        reused = answer.prefix_tokens + answer.chunk_tokens
        return Sample(phase, link, answer.ttft, answer.prompt_tokens, reused)

    for number, (segments, order) in enumerate(zip(prompts, orders, strict=True)):
        reordered = rotate_chunks(segments)
        for phase, sent in zip(PHASES, (segments, segments, reordered), strict=False):
            if phase != "reordered" or reordered != segments:
                yield from (sample(phase, link, str(number), sent) for link in order)
    for segments, order in zip(prompts, orders, strict=True):
        yield from (sample(PHASES[-1], link, "all", segments) for link in order)


def rows(samples: Sequence[Sample]) -> list[Row]:
    """Samples by phase and link, in the order in which they were first seen."""
    found = collections.defaultdict(list)
    for sample in samples:
        found[sample.phase, sample.link].append(sample)
    return [
        Row(
            phase,
            link,
            len(group),
            ttft_ms_p50=1000 * quantile([one.ttft for one in group], 0.5),
            ttft_ms_p99=1000 * quantile([one.ttft for one in group], 0.99),
            prompt_tokens=sum(one.prompt for one in group),
            reused_tokens=sum(one.reused for one in group),
        )
        for (phase, link), group in sorted(found.items(), key=lambda item: PHASES.index(item[0][0]))
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """The median for 0.5; else the smallest value that at least this share of all values does not exceed."""
    if share == 0.5:
        return statistics.median(values)
    return sorted(values)[-(-len(values) * round(100 * share) // 100) - 1]


def table(measured: Sequence[Row]) -> str:
    """The rows for people, at most 80 columns wide."""
    width = max(len("link"), *(len(row.link) for row in measured))
    form = f"{{:9}}  {{:{width}}}  {{:>7}}  {{:>9}}  {{:>9}}  {{:>12}}"
    lines = [form.format("phase", "link", "prompts", "TTFT p50", "p99, ms", "tokens reused")]
    for row in measured:
        times = f"{row.ttft_ms_p50:.1f}", f"{row.ttft_ms_p99:.1f}"
        lines.append(form.format(row.phase, row.link, row.samples, *times, f"{row.reused:.1%}"))
    return "\n".join(lines)


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and those after -- for the server. Exits if one is invalid."""
    parser = parser_of("bench", __doc__, "(--model-path MODEL | --url URL) [options] [-- FLAGS]")
    where = parser.add_argument_group("what to ask").add_mutually_exclusive_group(required=True)
    where.add_argument("--model-path", metavar="MODEL", help="model to start a server with")
    where.add_argument("--url", help="running server, one of sglang_lazy.launch_server, idle")
    what = parser.add_argument_group("what to send")
    what.add_argument("--api-key", metavar="KEY", help="key of the server at --url")
    what.add_argument("--links", type=split_policies, metavar="LINK,...", help="policies (default: the server's)")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="JSON Lines file; without, prompts are made up:")
    for name, default, meaning in MADE_UP:
        what.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=f"{meaning} ({default})")
    what.add_argument("--out", type=Path, metavar="FILE", help="all samples as JSON")
    args, flags = parse(parser, argv)
    if args.url and flags:
        parser.error("flags after -- are for a server started with --model-path")
    if args.model_path:
        if args.api_key:
            parser.error("--api-key goes with --url")
        engine_flags(parser, args.model_path, flags)
    if args.out is not None and not args.out.parent.is_dir():
        parser.error(f"--out: there is no folder {args.out.parent}")
    return args, flags


MADE_UP = [("count", 20, "prompts"), ("chunks", 5, "chunks of each"), ("words", 200, "words of a chunk")]


def _positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {text!r:.50}")


@contextlib.contextmanager
def _server(args: argparse.Namespace, flags: list[str]) -> Iterator[str]:
    """The URL of the server. Raises ValueError with the end of its log if it does not start or breaks down."""
    if args.url:
        yield args.url.rstrip("/")
        return
    from sglang_lazy.testing import ServerError, log_tail, running_server

    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            with running_server(["--model-path", args.model_path, *flags], log, timeout=1800) as url:
                yield url
        except ServerError as error:
            raise ValueError(f"{error}\n{log_tail(log)}") from None


def run(args: argparse.Namespace, flags: list[str]) -> list[Sample]:
    """The samples for the command's flags. Raises ValueError if there can be none."""
    if args.prompts:
        prompts = [parse_prompt(value).segments for value in read_prompts(args.prompts)]
    else:
        prompts = made_up(args.count, args.chunks, args.words)
    if not prompts:
        raise ValueError(f"{args.prompts} has no prompts")
    import requests

    from sglang_lazy.testing import Client, ServerError
    from sglang_lazy.verify import connect
    from sglang_lazy.verify.remote import no_answer

    with _server(args, flags) as url:
        generate = connect(url, args.api_key)  # to have refusals in the server's words
        first = {"segments": prompts[0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        answers = [generate(link=link, **first) for link in (*(args.links or [None]), FULL)]
        links = list(dict.fromkeys(answer["meta_info"]["link"] for answer in answers))
        client = Client(url, timeout=600)
        if args.api_key:
            client.session.headers["Authorization"] = f"Bearer {args.api_key}"

        def ask(**prompt: Any) -> "Generation":
            return client.generate(prompt, 1)

        try:
            list(measure(ask, prompts[:1], links))  # kernels are compiled, or loaded, at their first use
            return list(measure(ask, prompts, links))
        except ServerError as error:
            raise ValueError(str(error)) from None
        except requests.RequestException as error:
            raise ValueError(no_answer(url, error)) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, and write the samples to --out."""
    args, flags = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        samples = run(args, flags)
        if args.out is not None:
            args.out.write_text(json.dumps([dataclasses.asdict(one) for one in samples], indent=1) + "\n", "utf-8")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    cold = [sample for sample in samples if sample.phase == "cold"]
    print(f"prompts of {statistics.fmean(one.prompt for one in cold):,.0f} tokens, one at a time\n")
    print(table(rows(samples)))


if __name__ == "__main__":
    main()

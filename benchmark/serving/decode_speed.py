"""Decode speed over cached context: output tokens per second of batches that decode together, over HTTP.

Each request has chunks of random tokens and a new question; all context is cached before the measurement.
`unshared`: no two requests of a batch share a chunk. `shared`: the requests of a group of 8 have the same chunks, each
in its own order. Plain contenders get the same tokens as an exact prefix. Prefill is left out: the
window begins when every request of the batch has its first token and ends when the first of them is done. Rows go to
`--out` as JSON lines, after a line with the environment for each server. Flags after `--` go to every server.

    python -m benchmark.serving.decode_speed --contenders lazy,stock --out decode.jsonl -- --attention-backend fa3

Without a GPU, to see that it works:

    python -m benchmark.serving.decode_speed --model tiny --chunk-len 64 --question-len 8 --output-len 16 \
        --batches 1 8 --repetitions 2 --out decode.jsonl -- --max-total-tokens 20000
"""

import argparse
import asyncio
import itertools
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import requests

from benchmark.serving.arguments import add_server_arguments, positive, typed
from benchmark.serving.client import Timeline, encode, new_session, stream
from benchmark.serving.contenders import contender, running, server_of
from benchmark.serving.environment import describe_environment
from benchmark.serving.models import model_flags, model_path
from benchmark.serving.prompts import as_chunks, chunk, random_tokens, text
from sglang_lazy.testing import Client, ServerError, device_flags, log_tail

GROUP = 8
WARM_UP_TOKENS = 4
TABLE = "{:16} {:9} {:>5} {:>8} {:>10} {:>9} {:>9}   {}"


class Contexts:
    """Chunks of random tokens, and batches of prompts made from them."""

    def __init__(self, args: argparse.Namespace):
        self.rng = random.Random(args.seed)
        self.question_len = args.question_len
        self.requests = [
            [random_tokens(self.rng, args.chunk_len) for _ in range(args.num_chunks)] for _ in range(max(args.batches))
        ]

    def batch(self, size: int, *, shared: bool, shuffled: bool) -> list[list[list[int]]]:
        """The contexts of a batch, each a list of chunks; a larger batch contains those of smaller ones.

        shuffled: whether each member of a group has its own order; not for plain prefixes.
        """
        if not shared:
            return self.requests[:size]
        contexts = [self.requests[index // GROUP] for index in range(size)]
        return [self.rng.sample(chunks, len(chunks)) for chunks in contexts] if shuffled else contexts

    def prompts(self, contexts: list[list[list[int]]]) -> list[list[dict]]:
        """The same contexts, each followed by a new question."""
        return [[*map(chunk, chunks), text(random_tokens(self.rng, self.question_len))] for chunks in contexts]


def decode_rate(timelines: list[Timeline]) -> tuple[float, float]:
    """Output tokens per second while the whole batch decodes, and for how many seconds it does.

    For each request, the tokens between its first and last arrival in the window, over the time between the two, so
    that the window's ends cut no step.
    """
    begin = max(timeline.arrivals[0][0] for timeline in timelines)
    end = min(timeline.arrivals[-1][0] for timeline in timelines)
    rate = 0.0
    for timeline in timelines:
        inside = [arrival for arrival in timeline.arrivals if begin <= arrival[0] <= end]
        if len(inside) < 2:
            raise ValueError(
                "the requests did not decode together: the batch may not fit, or --output-len is too short"
            )
        (first_time, first_count), (last_time, last_count) = inside[0], inside[-1]
        rate += (last_count - first_count) / (last_time - first_time)
    return rate, end - begin


async def stream_all(url: str, bodies: list[bytes]) -> list[Timeline]:
    async with new_session() as session:
        return await asyncio.gather(*(stream(session, url, body) for body in bodies))


def measure(url: str, name: str, contexts: Contexts, *, batch: int, shared: bool, args: argparse.Namespace) -> dict:
    """One row: the batch decoded several times, with all its context cached."""
    form = contender(name).form
    context_tokens = args.num_chunks * args.chunk_len
    chosen = contexts.batch(batch, shared=shared, shuffled=form is as_chunks)

    def run(output_len: int) -> list[Timeline]:
        bodies = [encode(form(prompt), output_len) for prompt in contexts.prompts(chosen)]
        return asyncio.run(stream_all(url, bodies))

    run(WARM_UP_TOKENS)
    rates, windows = [], []
    for _ in range(args.repetitions):
        timelines = run(args.output_len)
        if (cached := min(timeline.cached_tokens for timeline in timelines)) < context_tokens:
            raise ValueError(
                f"only {cached} of {context_tokens} tokens of context were still cached: the pool is too small"
            )
        rate, window = decode_rate(timelines)
        rates.append(rate)
        windows.append(window)
    median = statistics.median(rates)
    return {
        "contender": name,
        "sharing": "shared" if shared else "unshared",
        "batch": batch,
        "context_tokens": context_tokens,
        "output_len": args.output_len,
        "decode_tokens_per_s": round(median, 1),
        "ms_per_step": round(1000 * batch / median, 3),
        "window_s": round(statistics.median(windows), 3),
        "samples": [round(rate, 1) for rate in rates],
    }


def measure_all(url: str, name: str, contexts: Contexts, args: argparse.Namespace):
    """The rows of one contender; a batch that does not fit into the KV pool gets a row that says so."""
    pool = requests.get(f"{url}/server_info", timeout=60).json()["max_total_num_tokens"]
    tail = args.question_len + args.output_len
    for shared in (False, True):
        for batch in sorted(args.batches, reverse=True):  # the largest first: it caches the others' contexts too
            if shared and batch == 1:
                continue
            held = -(-batch // GROUP) if shared else batch
            needed = held * args.num_chunks * args.chunk_len + batch * tail
            if needed > pool:
                sharing = "shared" if shared else "unshared"
                reason = f"needs {needed} tokens of KV, the pool has {pool}"
                yield {"contender": name, "sharing": sharing, "batch": batch, "skipped": reason}
            else:
                yield measure(url, name, contexts, batch=batch, shared=shared, args=args)


def print_row(row: dict) -> None:
    first = (row["contender"], row["sharing"], row["batch"])
    if "skipped" in row:
        print(TABLE.format(*first, "", "", "", "", f"skipped: {row['skipped']}"), flush=True)
    else:
        columns = ("context_tokens", "decode_tokens_per_s", "ms_per_step", "window_s", "samples")
        print(TABLE.format(*first, *(str(row[column]) for column in columns)), flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_arguments(parser)
    count = typed(positive)
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 8, 64], help="requests decoding together")
    parser.add_argument("--num-chunks", type=count, default=5, help="chunks per request")
    parser.add_argument("--chunk-len", type=count, default=2048, help="tokens")
    parser.add_argument("--question-len", type=count, default=32, help="tokens")
    parser.add_argument("--output-len", type=count, default=256, help="tokens")
    parser.add_argument("--repetitions", type=count, default=3, help="samples per row")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to this file")
    parser.add_argument("--log-dir", type=Path, help="folder for the servers' output, else beside --out")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the server on the way out
    args = parse_args()
    contexts = Contexts(args)
    log_dir = args.log_dir or args.out.parent
    log_dir.mkdir(parents=True, exist_ok=True)
    failed = []
    print(TABLE.format("contender", "sharing", "batch", "context", "tokens/s", "ms/step", "window s", "samples"))
    with tempfile.TemporaryDirectory() as scratch, open(args.out, "a", encoding="utf-8") as out:

        def write(line: dict) -> None:
            print(json.dumps(line), file=out, flush=True)

        path = model_path(args.model, Path(scratch))
        flags = [*device_flags(), *model_flags(args.model, path), *args.server_flags]
        for server, names in itertools.groupby(args.contenders, server_of):
            names = list(names)
            log = log_dir / f"{names[0]}.server.log"
            environment = describe_environment(
                commit=args.commit, seed=args.seed, server_flags=[server.module, *flags, *server.flags]
            )
            start = time.monotonic()
            try:
                with running(server, flags, log, args.start_timeout) as url:
                    environment["start_up_s"] = round(time.monotonic() - start, 1)
                    write({"contenders": names, "environment": environment})
                    for name in names:
                        Client(url).flush_cache()
                        for row in measure_all(url, name, contexts, args):
                            write(row)
                            print_row(row)
            except (ServerError, requests.RequestException, ValueError) as error:
                failed += names
                print(f"{names[0]} failed: {error}\n{log_tail(log, lines=60)}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

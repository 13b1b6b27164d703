"""First contact with a GPU: TTFT of cold, warm and reordered prompts on a random-weight Llama-3.1-8B.

Starts a server, sends the real requests of examples/data and synthetic prompts of equal chunks, once as chunks and once
as plain prompts, prints a table and writes everything measured as JSON. TTFT runs from the client's send to the first
streamed token. Flags after `--` go to the server.

    python benchmark/serving/first_contact.py --attention-backend flashinfer --commit "$(git rev-parse HEAD)" \
        --out results.json --log server.log
"""

import argparse
import dataclasses
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import examples_path  # noqa: F401 - puts examples on the path
import requests
from environment import describe_environment
from models import model_flags, model_path
from prompts import as_chunks, as_plain, chunk, random_tokens, text
from sample import load_sample, without_chunks
from serving import Client, Generation, ServerError, device_flags, log_tail, running_server
from tqdm import tqdm

from sglang_lazy.verify.prompts import retrieval_segments

QUESTION_TOKENS = 32
TTFT_TOKENS = 8
DECODE_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class Row:
    """One kind of request, measured several times. Token counts are medians over the samples."""

    workload: str
    prompt: str  # "chunks" or "plain"
    cache: str  # what the cache holds when the request arrives
    prompt_tokens: int
    prefix_tokens: int
    chunk_tokens: int
    ttft_ms_p50: float
    ttft_ms_min: float
    ttft_ms_max: float
    decode_tokens_per_s: float
    samples: int

    @classmethod
    def of(cls, workload: str, prompt: str, cache: str, results: list[Generation]) -> "Row":
        ttft_ms = [result.ttft * 1000 for result in results]
        return cls(
            workload,
            prompt,
            cache,
            *(
                round(statistics.median(getattr(result, field) for result in results))
                for field in ("prompt_tokens", "prefix_tokens", "chunk_tokens")
            ),
            *(round(value, 2) for value in (statistics.median(ttft_ms), min(ttft_ms), max(ttft_ms))),
            round(statistics.median(result.decode_rate for result in results), 1),
            len(results),
        )


TABLE = "{:12} {:7} {:10} {:>7} {:>7} {:>7} {:>9} {:>9} {:>9} {:>7} {:>4}"
TABLE_HEADER = TABLE.format(
    "workload", "prompt", "cache", "tokens", "prefix", "chunks", "TTFT p50", "min", "max", "tok/s", "n"
)


class Results:
    """Rows and agreements as they come in: printed at once, written as one JSON file at the end."""

    def __init__(self, environment: dict):
        self.environment = environment
        self.rows: list[Row] = []
        self.agreement: dict[str, str] = {}

    def add(self, row: Row) -> None:
        if not self.rows:
            print(TABLE_HEADER)
        self.rows.append(row)
        print(TABLE.format(*dataclasses.astuple(row)), flush=True)

    def agree(self, name: str, first: Generation, second: Generation) -> None:
        """Note for how many tokens two greedy answers agree. In bf16 a near tie may rightly end it early."""
        pairs = list(zip(first.output_ids, second.output_ids, strict=True))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        self.agreement[name] = f"{same} of {len(pairs)} tokens, {len(set(first.output_ids))} distinct"
        print(f"greedy agreement, {name}: {self.agreement[name]}", flush=True)

    def write(self, path: Path, error: str | None) -> None:
        content = {
            "environment": self.environment,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "agreement": self.agreement,
            "error": error,
        }
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class SyntheticPrompts:
    """Prompts of equal chunks of random tokens, each time with a question not seen before."""

    def __init__(self, num_chunks: int, chunk_len: int, rng: random.Random):
        self.rng = rng
        self.chunks = [random_tokens(rng, chunk_len) for _ in range(num_chunks)]

    def segments(self, *, reordered: bool = False) -> list[dict]:
        chunks = self.chunks
        while reordered and chunks[0] is self.chunks[0]:  # another first chunk leaves no common prefix
            chunks = self.rng.sample(self.chunks, len(self.chunks))
        return [*map(chunk, chunks), text(random_tokens(self.rng, QUESTION_TOKENS))]


def measure_synthetic(client: Client, results: Results, name: str, rng: random.Random, repetitions: int) -> None:
    """Cold, then warm in the same order, then warm in another order; new chunks in each repetition."""
    num_chunks, chunk_len = map(int, name.split("x"))
    for prompt, form in (("chunks", as_chunks), ("plain", as_plain)):
        samples: dict[str, list[Generation]] = {"cold": [], "warm": [], "reordered": []}
        for repetition in tqdm(range(repetitions + 1), desc=f"{name} {prompt}", leave=False, disable=None):
            client.flush_cache()
            prompts = SyntheticPrompts(num_chunks, chunk_len, rng)
            for cache, generations in samples.items():
                generation = client.generate(form(prompts.segments(reordered=cache == "reordered")), TTFT_TOKENS)
                if repetition > 0:  # the first one compiles and allocates
                    generations.append(generation)
        for cache, generations in samples.items():
            results.add(Row.of(name, prompt, cache, generations))
        generation = client.generate(form(prompts.segments()), DECODE_TOKENS)
        results.add(Row.of(name, prompt, "decode", [generation]))


def measure_real(client: Client, results: Results, repetitions: int) -> None:
    """The sample's requests one after another from an empty cache, then all of them again."""
    prompts = [retrieval_segments(request) for request in load_sample()]
    for prompt, form in (("chunks", as_chunks), ("plain", lambda segments: as_chunks(without_chunks(segments)))):
        samples: dict[str, list[Generation]] = {"first pass": [], "again": []}
        for repetition in tqdm(range(repetitions + 1), desc=f"real {prompt}", leave=False, disable=None):
            client.flush_cache()
            for generations in samples.values():
                passed = [client.generate(form(segments), TTFT_TOKENS) for segments in prompts]
                if repetition > 0:
                    generations.extend(passed)
        for cache, generations in samples.items():
            results.add(Row.of("real", prompt, cache, generations))


def check(client: Client, results: Results, rng: random.Random) -> None:
    """How far greedy answers agree where the method says they are the same."""
    prompts = SyntheticPrompts(5, 512, rng)
    segments = prompts.segments()
    client.flush_cache()
    cold = client.generate(as_chunks(segments), DECODE_TOKENS)
    results.agree("chunks: cold and warm", cold, client.generate(as_chunks(segments), DECODE_TOKENS))

    client.flush_cache()
    other_order = [*reversed(segments[:-1]), segments[-1]]
    client.generate(as_chunks(other_order), TTFT_TOKENS)
    reordered = client.generate(as_chunks(segments), DECODE_TOKENS)
    results.agree("chunks: cold and warm from another order", cold, reordered)

    # One chunk at offset 0 sees what it would see as plain text, so the stock path must say the same.
    leading = [segments[0], segments[-1]]
    client.flush_cache()
    alone = client.generate(as_chunks(leading), DECODE_TOKENS)
    client.flush_cache()
    results.agree("one leading chunk and plain", alone, client.generate(as_plain(leading), DECODE_TOKENS))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention-backend", help="for the server; without it SGLang chooses")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--log", type=Path, required=True, help="file for the server's output")
    parser.add_argument("--commit", help="recorded in the results; where git is absent it has to be given")
    parser.add_argument("--workloads", nargs="+", default=["5x2048", "20x128", "10x512"], help="chunks x tokens")
    parser.add_argument("--repetitions", type=int, default=10, help="samples per synthetic row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model-path", default="llama-3.1-8b", help="to serve; that shape has random weights")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds to wait for the server")
    parser.add_argument("--self-check", action="store_true", help="only compare answers, measure nothing")
    parser.add_argument("server_flags", nargs="*", help="flags for the server, after `--`")
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then too
    args = parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as scratch:
        path = model_path(args.model_path, Path(scratch))
        flags = [*device_flags(), *model_flags(args.model_path, path)]
        if args.attention_backend:
            flags += ["--attention-backend", args.attention_backend]
        flags += args.server_flags
        results = Results(describe_environment(commit=args.commit, seed=args.seed, server_flags=flags))
        error = "interrupted"
        try:
            start = time.monotonic()
            with running_server(flags, args.log, timeout=args.start_timeout, usual=90) as url:
                results.environment["start_up_s"] = round(time.monotonic() - start, 1)
                print(json.dumps(results.environment, indent=2), flush=True)
                client = Client(url)
                check(client, results, rng)
                if not args.self_check:
                    for name in args.workloads:
                        measure_synthetic(client, results, name, rng, args.repetitions)
                    measure_real(client, results, repetitions=max(1, args.repetitions // 3))
            error = None
        except (ServerError, requests.RequestException) as failure:
            error = str(failure)
            sys.exit(f"failed: {error}\n{log_tail(args.log, lines=60)}")
        finally:
            results.write(args.out, error)


if __name__ == "__main__":
    main()

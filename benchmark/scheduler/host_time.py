"""Host time of the scheduler per chunk reference, by step and number of resident chunks.

SGLang's own classes and our hooks run without a model: each request runs from arrival to its first token and ends
there. Chunks are drawn from a Zipf distribution. `warm`: every chunk is resident. `evicting`: the pool is full and
there are four times as many chunks as fit, so misses are computed and evict others. `stock` is SGLang's radix cache on
plain prompts of the same length: all begin with the same tokens, and each ends with one of as many documents as there
are chunks, a leaf of the tree as long as a chunk. `lazy-plain` gets the prompts of `stock`: the cost of our hooks to
prompts without chunks. `lazy-metrics` is `lazy` with `--enable-metrics`. `lazy-tiers` is `lazy` with a host tier that
holds ten times as many chunks, and with requests for all of them when evicting: chunks missing on the device are
loaded, except that nothing is copied. Times are CPU time of the thread, and torch has no other threads, so other work
on the machine has less effect; shapes and contenders of one chunk length take turns. Finally, if shapes differ only in
the number of chunks, it prints what each further chunk adds to a request, resident or missing and computed. Rows go to
`--out` as JSON lines, after a line with the environment.

    python -m benchmark.scheduler.host_time --out host_time.jsonl
"""

import argparse
import collections
import gc
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmark.scheduler.host import MAX_CHUNKS, STEPS, Host
from benchmark.scheduler.traffic import CONTENDERS, QUESTION_LEN
from benchmark.serving.arguments import positive, positive_float, typed
from benchmark.serving.environment import describe_environment
from fakes.context import published

UNIVERSE = 4  # chunks per resident chunk, when evicting
TABLE = "{:6} {:9} {:8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  " + " ".join(["{:>9}"] * len(STEPS))
FURTHER = (
    "{contender:6} further chunk of {chunk_len}, {mode}, {resident} resident: {us_per_further_chunk} us, "
    "computed {us_per_fill} more, on average {us_on_average}"
)


class Case:
    """A contender's requests of one shape, and the host that serves them."""

    def __init__(self, name: str, shape: tuple[int, int], num_resident: int, evicting: bool, args: argparse.Namespace):
        num_chunks, chunk_len = shape
        self.name, self.num_chunks, self.chunk_len = name, num_chunks, chunk_len
        self.num_resident, self.evicting, self.separator_len = num_resident, evicting, args.separator_len
        traffic = CONTENDERS[name]
        self.traffic = traffic(args, shape, num_resident * ((traffic.on_host or UNIVERSE) if evicting else 1))
        text_len = num_chunks * args.separator_len + QUESTION_LEN
        prompt_len = num_chunks * chunk_len + text_len
        # Besides the chunks, or the common tokens of plain prompts, the pool holds the text of all requests or, when
        # evicting, of one.
        texts = 1 if evicting else args.requests + args.warm_up
        pool_size = (num_resident + num_chunks) * chunk_len + texts * (text_len + 1)
        host_size = traffic.on_host and (traffic.on_host + 1) * num_resident * chunk_len
        self.host = Host(traffic.reuses, pool_size, prompt_len + 8, args.device, host_size)
        self.traffic.fill(self.host, num_resident)
        if traffic.metrics:
            self.host.publish_metrics()
        for _ in range(args.warm_up):
            self.host.serve(self.traffic.next(self.host))
        self.samples, self.filled, self.evicted_before = [], [], self.host.evicted

    def ask(self) -> None:
        """One request."""
        filled_before = self.host.filled
        self.samples.append(self.host.serve(self.traffic.next(self.host)))
        self.filled.append(self.host.filled - filled_before)

    def row(self) -> dict:
        """Microseconds per chunk of a request, by step and in total; per as many evicted tokens; per computed chunk."""
        evicted = round((self.host.evicted - self.evicted_before) / self.chunk_len, 1)
        per_chunk = {step: [sample.get(step, 0) / 1000 / self.num_chunks for sample in self.samples] for step in STEPS}
        totals = [sum(values) for values in zip(*per_chunk.values(), strict=True)]
        return {
            "contender": self.name,
            "shape": f"{self.num_chunks}x{self.chunk_len}",
            "separator_len": self.separator_len,
            "mode": "evicting" if self.evicting else "warm",
            "resident": self.num_resident,
            "requests": len(self.samples),
            "us_per_chunk": {"p50": p(totals, 50), "p99": p(totals, 99), "mean": mean(totals), "max": p(totals, 100)},
            "ms_per_request_p50": round(p(totals, 50) * self.num_chunks / 1000, 3),
            **regression(self.filled, [total * self.num_chunks for total in totals]),
            "evicted": evicted,
            "us_per_evicted": round(sum(per_chunk["eviction"]) * self.num_chunks / evicted, 2) if evicted else None,
            "steps_us_per_chunk": {
                step: {"p50": p(values, 50), "p99": p(values, 99), "mean": mean(values)}
                for step, values in per_chunk.items()
            },
        }


def regression(filled: list[int], totals: list[float]) -> dict:
    """Microseconds of a request without misses, and what each computed chunk adds, by least squares."""
    if min(filled) == max(filled):
        return {
            "filled": sum(filled),
            "us_without_fills": p(totals, 50) if not max(filled) else None,
            "us_per_fill": None,
        }
    per_fill, without = np.polyfit(filled, totals, 1)
    return {"filled": sum(filled), "us_without_fills": round(without, 2), "us_per_fill": round(per_fill, 2)}


def p(values: list[float], percent: int) -> float:
    return round(float(np.percentile(values, percent)), 2)


def mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 2)


def rows(args: argparse.Namespace) -> Iterator[dict]:
    """Contenders take turns, request by request, so that slow moments of the machine affect all of them.

    The largest come last: allocation is slower in a process that has returned much memory.
    """
    lengths = sorted({chunk_len for _, chunk_len in args.shapes})
    for chunk_len, num_resident, evicting in itertools.product(lengths, sorted(args.resident), (False, True)):
        shapes = [shape for shape in args.shapes if shape[1] == chunk_len and shape[0] <= num_resident]
        compared = itertools.product(shapes, args.contenders)
        cases = [Case(name, shape, num_resident, evicting, args) for shape, name in compared]
        gc.collect()
        for _ in range(args.requests):
            for case in cases:
                case.ask()
        yield from [case.row() for case in cases]
        del cases  # hosts are in reference cycles: free their memory before the next ones allocate
        gc.collect()


def further_chunks(rows: list[dict]) -> Iterator[dict]:
    """What each further resident chunk adds to a request: the slope from the fewest to the most chunks of a length.

    Also what a computed chunk adds to requests with the most, and the slope of the means over resident and computed
    chunks.
    """
    requests, fills, means = (collections.defaultdict(dict) for _ in range(3))
    for row in rows:
        num_chunks, chunk_len = parse_shape(row["shape"])
        same = (row["contender"], chunk_len, row["mode"], row["resident"])
        if row["us_without_fills"] is not None:
            requests[same][num_chunks] = row["us_without_fills"]
            fills[same][num_chunks] = row["us_per_fill"]
            means[same][num_chunks] = row["us_per_chunk"]["mean"] * num_chunks
    for same, times in requests.items():
        contender, chunk_len, mode, resident = same
        fewest, most = min(times), max(times)
        if fewest < most:
            yield {
                "contender": contender,
                "chunk_len": chunk_len,
                "mode": mode,
                "resident": resident,
                "us_per_further_chunk": round((times[most] - times[fewest]) / (most - fewest), 2),
                "us_per_fill": fills[same][most],
                "us_on_average": round((means[same][most] - means[same][fewest]) / (most - fewest), 2),
            }


def print_row(row: dict) -> None:
    total, steps = row["us_per_chunk"], row["steps_us_per_chunk"]
    evicted = "" if row["us_per_evicted"] is None else row["us_per_evicted"]
    first = (row["contender"], row["shape"], row["mode"], row["resident"], row["ms_per_request_p50"])
    numbers = (total["p50"], total["p99"], total["mean"], evicted, *(steps[step]["mean"] for step in STEPS))
    print(TABLE.format(*first, *numbers), flush=True)


def parse_shape(value: str) -> tuple[int, int]:
    """Parse chunks per request and tokens per chunk, such as `5x2048`."""
    num_chunks, chunk_len = map(positive, value.split("x"))
    if num_chunks > MAX_CHUNKS:
        raise ValueError(f"at most {MAX_CHUNKS} chunks per request, got {num_chunks}")
    return num_chunks, chunk_len


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = typed(positive)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument(
        "--shapes",
        type=typed(parse_shape),
        nargs="+",
        default=[(1, 128), (20, 128), (1, 2048), (20, 2048)],
        help="chunks per request and tokens per chunk; default: 1x128 20x128 1x2048 20x2048",
    )
    parser.add_argument("--resident", type=count, nargs="+", default=[100, 1000, 10000, 50000], help="chunks")
    parser.add_argument(
        "--separator-len", type=int, default=0, help="tokens of text after each chunk of a linked prompt"
    )
    parser.add_argument("--requests", type=count, default=300, help="measured for each row")
    parser.add_argument("--warm-up", type=count, default=50, help="requests before these")
    parser.add_argument("--alpha", type=typed(positive_float), default=0.8, help="of the Zipf distribution")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="device of the slot numbers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="recorded in the results; required without git")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are added to this file")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    print(TABLE.format("", "", "", "resident", "ms/req", "us/chunk", "p99", "mean", "us/evict", *STEPS))
    with published(args.device), tempfile.TemporaryDirectory() as folder, open(args.out, "a", encoding="utf-8") as out:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder  # metrics go to files, as in a server's processes
        environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=[])
        print(json.dumps({"environment": environment}), file=out, flush=True)
        measured = []
        for row in rows(args):
            print(json.dumps(row), file=out, flush=True)
            print_row(row)
            measured.append(row)
        for row in further_chunks(measured):
            print(json.dumps(row), file=out, flush=True)
            print(FURTHER.format(**row))


if __name__ == "__main__":
    main()

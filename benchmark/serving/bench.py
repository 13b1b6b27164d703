"""Serving benchmark: the same traffic to every contender, over HTTP, one after another.

A case is a workload with its flags and the rates at which its conversations arrive; each rate starts from an empty
cache. One start of a server serves all cases. Cases come from `--case`, which can be repeated, and from the lines of
`--plan`. With `--together` all servers are up at once and take turns: only one is under load at a time. Flags after
`--` go to every server.

    python -m benchmark.serving.bench --contenders stock,lazy --kv-pool-gb 10 --out results/core \\
        --case "synthetic --alpha 1.1 --request-rate 1 2 4 8" --case "chat --request-rate 8"

`--case "synthetic --help"` lists a workload's flags; docs/benchmarks.md says what the results mean. The results folder
gets `rows.jsonl` (a line for each contender, case, rate and phase), `environment.json` and the servers' logs; plots.py
draws figures from it, paired.py computes confidence intervals of differences.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import requests

from benchmark.serving.arguments import add_server_arguments, positive_float, typed
from benchmark.serving.case import Case, Run, parse_case, read_plan
from benchmark.serving.contenders import Server, running, server_of
from benchmark.serving.environment import describe_environment
from benchmark.serving.models import draft_flags, load_tokenizer, model_flags, model_path, served_kv_bytes
from benchmark.serving.pinning import pinned
from sglang_lazy.testing import ServerError, device_flags, log_tail

TABLE = "{:16} {:>6} {:10} {:>6} {:10} {:>6} {:>9} {:>9} {:>9} {:>9} {:>8} {:>6} {}"
COLUMNS = (
    "contender",
    "KV GB",
    "workload",
    "rate",
    "phase",
    "n",
    "TTFT p50",
    "p99",
    "TPOT p50",
    "E2E p50",
    "1/s",
    "hits",
)


def print_row(row: dict) -> None:
    times = (row[column] for column in ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "e2e_ms_p50"))
    print(
        TABLE.format(
            row["contender"],
            f"{row['kv_pool_bytes'] / 1e9:.3g}",
            row["workload"],
            "inf" if row["request_rate"] is None else f"{row['request_rate']:g}",
            row["phase"],
            row["requests"],
            *(f"{milliseconds:.1f}" for milliseconds in times),
            f"{row['request_throughput']:.2f}",
            f"{row['hit_rate']:.0%}",
            "saturated" if row["saturated"] else "",
        ).rstrip(),
        flush=True,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_server_arguments(parser)
    parser.add_argument(
        "--case", dest="cases", type=parse_case, action="append", default=[], help="a workload and its flags, quoted"
    )
    parser.add_argument("--plan", type=typed(read_plan), nargs="+", default=[], help="files with a case on each line")
    parser.add_argument(
        "--kv-pool-gb", type=typed(positive_float), nargs="+", default=[None], help="sizes of the KV pool, 1e9 bytes"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="start all servers of a pool size at once; they take turns, stage by stage",
    )
    parser.add_argument("--pin", action="store_true", help="pin the client and each kind of process to separate cores")
    parser.add_argument("--out", type=Path, required=True, help="results folder, new or empty")
    args = parser.parse_args()
    args.cases = [*map(parse_case, itertools.chain(*args.plan)), *args.cases]
    if not args.cases:
        parser.error("there is no case: give --case or --plan")
    for case in args.cases:
        if case.contenders and not set(case.contenders) & set(args.contenders):
            parser.error(f"a {case.name} case is for {', '.join(case.contenders)} only: name one in --contenders")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: every run needs a new folder")
    return args


class Results:
    """The results folder, written as results arrive."""

    def __init__(self, folder: Path, environment: dict):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.servers: list[dict] = []
        self.environment = {**environment, "servers": self.servers}
        self.write_environment()

    def add_row(self, row: dict) -> None:
        with open(self.folder / "rows.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps(row), file=file)
        print_row(row)

    def write_environment(self) -> None:
        text = json.dumps(self.environment, indent=2) + "\n"
        (self.folder / "environment.json").write_text(text, encoding="utf-8")


class Runner:
    """A server in the comparison, and the facts recorded about it. If it fails it is stopped, and the others continue.

    measure: measures a contender's run at a URL, stage by stage; yields the rows completed by each stage.
    """

    def __init__(
        self,
        server: Server,
        names: list[str],
        flags: list[str],
        results: Results,
        measure: Callable[[str, str, Run], Iterator[list[dict]]],
    ):
        self.server, self.names, self.flags, self.results, self.measure = server, names, flags, results, measure
        self.log = results.folder / f"{len(results.servers)}-{names[0]}.server.log"
        command = shlex.join([server.module, *flags, *server.flags])
        self.facts = {"contenders": list(names), "command": command, "failure": "interrupted"}
        results.servers.append(self.facts)
        self.stack = contextlib.ExitStack()
        self.url: str | None = None
        self.lost: set[tuple[str, Case]] = set()  # fell behind at an earlier rate

    def start(self, timeout: float) -> None:
        start = time.monotonic()
        with self._noting_failure():
            self.url = self.stack.enter_context(running(self.server, self.flags, self.log, timeout))
            self.facts["start_up_s"] = round(time.monotonic() - start, 1)

    def ask(self, run: Run) -> Iterator[None]:
        """Measure this server's contenders, except those that fell behind; yields after each stage."""
        for name in self.names:
            if self.url is None or (name, run.case) in self.lost or name not in (run.case.contenders or [name]):
                continue
            with self._noting_failure():
                for rows in self.measure(self.url, name, run):
                    for row in rows:
                        self.results.add_row(row)
                    if any(row["saturated"] for row in rows if row["phase"] != "cold"):
                        self.lost.add((name, run.case))
                    yield
        self.names.reverse()

    def finish(self) -> None:
        """Call this after the last run."""
        if self.url is not None:
            self.facts["failure"] = None

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except (ServerError, requests.RequestException) as error:
            self.url, self.facts["failure"] = None, str(error)
            print(f"{self.names[0]} failed: {error}\n{log_tail(self.log, lines=60)}", file=sys.stderr, flush=True)
            self.stack.close()


def compare(runners: list[Runner], runs: list[Run], timeout: float, pin: bool = False) -> None:
    """Start all servers at once and measure each run with all of them, one stage at a time.

    They take turns from first to last and back, so that none always follows the same other.
    pin: pin processes to cores of their own once the servers are up. Exits if there are too few cores.
    """
    with contextlib.ExitStack() as stack:
        for runner in runners:
            stack.push(runner.stack)
        with concurrent.futures.ThreadPoolExecutor(len(runners)) as pool:
            list(pool.map(lambda runner: runner.start(timeout), runners))
        if pin:
            try:
                stack.enter_context(pinned([runner.url for runner in runners if runner.url is not None]))
            except ValueError as error:
                sys.exit(f"error: {error}")
        done = object()
        for number, run in enumerate(runs):
            asked = [runner.ask(run) for runner in (reversed(runners) if number % 2 else runners)]
            while asked:
                asked = [stages for stages in asked if next(stages, done) is not done][::-1]
        for runner in runners:
            runner.finish()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers on the way out
    args = parse_args()
    # Imports SGLang, which takes seconds, only once the arguments are valid.
    from benchmark.serving.measure import measure

    with tempfile.TemporaryDirectory() as scratch:
        path = model_path(args.model, Path(scratch))
        kv_bytes = served_kv_bytes(path)
        flags = [*device_flags(), *model_flags(args.model, path), *draft_flags(args.model, path)]
        flags += ["--enable-metrics", *args.server_flags]
        try:
            tokenizer = load_tokenizer(path)
            runs = [run for case in args.cases for run in case.runs(args.seed, tokenizer)]
        except ValueError as error:
            sys.exit(f"error: {error}")
        environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=flags)
        results = Results(args.out, {**environment, "model": args.model, "kv_bytes_per_token": kv_bytes})
        servers = [(server, list(names)) for server, names in itertools.groupby(args.contenders, server_of)]

        print(TABLE.format(*COLUMNS, "").rstrip())
        for pool_gb in args.kv_pool_gb:

            def measured(url: str, name: str, run: Run, pool_gb: float | None = pool_gb) -> Iterator[list[dict]]:
                columns = {"contender": name, "model": args.model, "kv_pool_gb": pool_gb}
                for rows in measure(url, name, run, args.seed, kv_bytes):
                    yield [{**columns, **row} for row in rows]

            pool = [] if pool_gb is None else ["--max-total-tokens", str(int(pool_gb * 1e9 / kv_bytes))]
            for group in [servers] if args.together else [[one] for one in servers]:
                try:
                    compare(
                        [Runner(server, names, [*flags, *pool], results, measured) for server, names in group],
                        runs,
                        args.start_timeout,
                        args.pin,
                    )
                finally:
                    results.write_environment()
    if failed := [name for server in results.servers if server["failure"] for name in server["contenders"]]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

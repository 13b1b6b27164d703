"""Serving benchmark: the same traffic to every contender, over HTTP, one server after another.

A case is a workload with its flags and the rates at which its conversations arrive; each rate starts from an empty
cache. One start of a server serves all cases. Cases come from `--case`, which can be repeated, and from the lines of
`--plan`. Flags after `--` go to every server.

    python benchmark/serving/bench.py --contenders stock,lazy --kv-pool-gb 10 --out results/core \\
        --case "synthetic --alpha 1.1 --request-rate 1 2 4 8" --case "chat --request-rate 8"

`--case "synthetic --help"` lists a workload's flags; docs/benchmarks.md says what the results mean. The results folder
gets `rows.jsonl` (a line for each contender, case, rate and phase), `environment.json` and the servers' logs; plots.py
makes figures of it.
"""

import argparse
import itertools
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import examples_path  # noqa: F401 - puts examples on the path
import requests
from arguments import add_server_arguments, positive_float, typed
from case import parse_case, read_plan
from contenders import CONTENDERS, Server, running
from environment import describe_environment
from models import kv_bytes_per_token, load_tokenizer, model_flags, model_path
from serving import ServerError, device_flags, log_tail

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
    parser.add_argument("--case", dest="cases", action="append", default=[], help="a workload and its flags, quoted")
    parser.add_argument("--plan", type=typed(read_plan), nargs="+", default=[], help="files with a case on each line")
    parser.add_argument(
        "--kv-pool-gb", type=typed(positive_float), nargs="+", default=[None], help="sizes of the KV pool, 1e9 bytes"
    )
    parser.add_argument("--out", type=Path, required=True, help="results folder, new or empty")
    args = parser.parse_args()
    args.cases = [parse_case(line) for line in [*itertools.chain(*args.plan), *args.cases]]
    if not args.cases:
        parser.error("there is no case: give --case or --plan")
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: every run has a folder of its own")
    return args


class Results:
    """The results folder, written as results come in."""

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


def run_server(
    server: Server,
    names: list[str],
    flags: list[str],
    timeout: float,
    results: Results,
    rows: Callable[[str, str], Iterator[dict]],
) -> None:
    """Serve contenders one after another. What fails is noted in the results, and the server stopped.

    rows: measures at a URL, for the name of a contender.
    """
    log = results.folder / f"{len(results.servers)}-{names[0]}.server.log"
    command = shlex.join([server.module, *flags, *server.flags])
    facts = {"contenders": names, "command": command, "failure": "interrupted"}
    results.servers.append(facts)
    start = time.monotonic()
    try:
        with running(server, flags, log, timeout) as url:
            facts["start_up_s"] = round(time.monotonic() - start, 1)
            for name in names:
                for row in rows(url, name):
                    results.add_row(row)
        facts["failure"] = None
    except (ServerError, requests.RequestException) as error:
        facts["failure"] = str(error)
        print(f"{names[0]} failed: {error}\n{log_tail(log, lines=60)}", file=sys.stderr, flush=True)
    finally:
        results.write_environment()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped then too
    args = parse_args()
    # Imports SGLang, which takes seconds: not before the arguments are known to be good.
    from measure import measure_all

    with tempfile.TemporaryDirectory() as scratch:
        path = model_path(args.model, Path(scratch))
        kv_bytes = kv_bytes_per_token(path)
        flags = [*device_flags(), *model_flags(args.model, path), "--enable-metrics", *args.server_flags]
        try:
            tokenizer = load_tokenizer(path)
            runs = [run for case in args.cases for run in case.runs(args.seed, tokenizer)]
        except ValueError as error:
            sys.exit(f"error: {error}")
        environment = describe_environment(commit=args.commit, seed=args.seed, server_flags=flags)
        results = Results(args.out, {**environment, "model": args.model, "kv_bytes_per_token": kv_bytes})

        print(TABLE.format(*COLUMNS, "").rstrip())
        for pool_gb in args.kv_pool_gb:

            def rows(url: str, name: str, pool_gb=pool_gb) -> Iterator[dict]:
                for row in measure_all(url, name, runs, args.seed, kv_bytes):
                    yield {"contender": name, "model": args.model, "kv_pool_gb": pool_gb, **row}

            pool = [] if pool_gb is None else ["--max-total-tokens", str(int(pool_gb * 1e9 / kv_bytes))]
            for server, names in itertools.groupby(args.contenders, key=lambda name: CONTENDERS[name].server):
                run_server(server, list(names), [*flags, *pool], args.start_timeout, results, rows)
    if failed := [name for server in results.servers if server["failure"] for name in server["contenders"]]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

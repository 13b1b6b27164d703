"""Tables of the host tier and storage: waits of running requests, host time, plain copies, and precomputing."""

from pathlib import Path

from benchmark.report.cells import in_order, lines, number, spread, table
from benchmark.report.host_time import values
from benchmark.report.serving import serving_rows

WAYS = ("load", "back_up")
BESIDE = ("prefill", "decoding")
WHICH = ("mean", "p50", "p99")


def backups(sources: list[Path]) -> str:
    """Milliseconds between the tokens of an answer while other requests bring new chunks."""
    steady = (row for row in serving_rows(sources) if row["phase"] == "steady")
    of = {row["contender"]: row for row in steady if row["parameters"]["output_len"] >= 64}
    body = [[name, *(number(of[name][f"tpot_ms_{which}"]) for which in WHICH)] for name in in_order(of)]
    return table(["contender", *(f"TPOT {which}" for which in WHICH)], body)


def loads(sources: list[Path]) -> str:
    """Microseconds that each further chunk adds to a request with and without a host tier, by resident chunks."""
    found = values(sources)
    columns = [(name, mode) for mode in ("warm", "evicting") for name in ("lazy", "lazy-tiers")]
    body = []
    for chunk_len, resident in sorted({(key[1], key[3]) for key in found if isinstance(key[1], int)}):
        cells = [spread(found[name, chunk_len, mode, resident]["us_on_average"]) for name, mode in columns]
        body.append([f"{chunk_len:,}", f"{resident:,}", *cells])
    titles = [f"{'resident' if mode == 'warm' else 'full pool'}: {name}" for name, mode in columns]
    return table(["chunk", "on the device", *titles], body)


def copies(sources: list[Path]) -> str:
    """Ways to copy between host and device: GB/s, milliseconds that passes lose per GB copied concurrently, and how
    long a small copy to the host waits meanwhile."""
    rows = [row for source in sources for row in lines(source) if "copy" in row]
    of: dict[tuple, dict] = {}
    for row in rows:
        what = row.get("beside", "small" if "small_copies" in row else "alone")
        of[row["by"], row["copy"], what] = row
    body = []
    for by in dict.fromkeys(row["by"] for row in rows):
        cells = [by]
        for copy in WAYS:
            cells.append(number(of[by, copy, "alone"]["gb_per_s"]))
            cells += [number(of[by, copy, name]["ms_per_gb"]) for name in BESIDE]
        wait = of[by, "back_up", "small"]["small_copies"]
        body.append([*cells, f"{number(wait['median_ms'])} ({number(wait['max_ms'])})"])
    titles = [f"{direction}: {title}" for direction in ("to the device", "to the host") for title in ("GB/s", *BESIDE)]
    return table(["copy", *titles, "wait"], body)


def precomputing(sources: list[Path]) -> str:
    """Chunk tokens per second, precomputed and as SGLang's prefill, for each whole round."""
    rows = [row for source in sources for row in lines(source) if "round" in row]
    speed = {(row["round"], row["contender"]): row["tokens"] / row["seconds"] for row in rows}
    numbers = sorted(n for n, name in speed if name == "precompute" and (n, "stock") in speed)
    body = []
    for n in numbers:
        ours, stock = speed[n, "precompute"], speed[n, "stock"]
        body.append([str(n), number(ours), number(stock), number(ours / stock)])
    return table(["round", "precompute", "prefill", "ratio"], body)

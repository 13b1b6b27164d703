"""Tables of the host tier and storage: waits of running requests, host time, plain copies, and precomputing."""

from pathlib import Path

from benchmark.report.cells import in_order, lines, number, spread, table
from benchmark.report.host_time import values
from benchmark.report.serving import serving_rows

WAYS = ("load", "back_up")
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


def transfers(sources: list[Path]) -> str:
    """GB/s between host and device."""
    rows = [row for source in sources for row in lines(source) if "copy" in row and "beside" not in row]
    plain = {row["copy"]: row for row in rows if "block_quota" not in row}
    body = [["one plain copy", "consecutive", *(number(plain[f"plain {way}"]["gb_per_s"]) for way in WAYS)]]
    for quota in sorted({row["block_quota"] for row in rows if "block_quota" in row}):
        for scattered in (False, True):
            of = {
                row["copy"]: row for row in rows if (row.get("block_quota"), row.get("scattered")) == (quota, scattered)
            }
            slots = "scattered" if scattered else "consecutive"
            body.append([_kernel(quota), slots, *(number(of[way]["gb_per_s"]) for way in WAYS)])
    return table(["copy", "slots", "to the device", "to the host"], body)


def interference(sources: list[Path]) -> str:
    """Milliseconds that passes lose per GB copied concurrently."""
    rows = [row for source in sources for row in lines(source) if "beside" in row]
    of = {(row.get("block_quota"), row["copy"].split()[-1], row["beside"]): row["ms_per_gb"] for row in rows}
    columns = [(way, name) for way in WAYS for name in dict.fromkeys(row["beside"] for row in rows)]
    quotas = dict.fromkeys(row.get("block_quota") for row in rows)
    body = [
        [
            _kernel(quota) if quota else "one plain copy",
            *(number(of[(quota, *column)]) for column in columns),
        ]
        for quota in quotas
    ]
    directions = dict(zip(WAYS, ("to the device", "to the host"), strict=True))
    return table(["copy", *(f"{directions[way]}: {name}" for way, name in columns)], body)


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


def _kernel(quota: int) -> str:
    return f"kernel, {quota} block{'s' * (quota > 1)}"

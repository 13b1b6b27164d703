"""Tables of host_time.py: medians, with their range if a file has several runs."""

import collections
import statistics
from pathlib import Path

from benchmark.report.cells import in_order, lines, number, spread, table

Values = dict[tuple, dict[str, list[float]]]

STEPS = "arrival", "admission", "layout", "batch", "segments", "publish", "finish"
"""Of a warm request."""


def values(sources: list[Path]) -> Values:
    """Each column's values in all runs, by contender, shape or chunk length, mode and resident chunks."""
    found: Values = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in (row for source in sources for row in lines(source) if "environment" not in row):
        key = (row["contender"], row.get("shape") or row["chunk_len"], row["mode"], row["resident"])
        for name, value in row.items():
            if isinstance(value, int | float):
                found[key][name].append(value)
    return found


def per_chunk(sources: list[Path], columns: dict[str, tuple[str, str, str]]) -> str:
    """Microseconds per chunk, one row per length and number of chunks.  columns: contender, mode and value."""
    found = values(sources)
    body = []
    for chunk_len, resident in sorted({(key[1], key[3]) for key in found if isinstance(key[1], int)}):
        cells = [spread(found[name, chunk_len, mode, resident][value]) for name, mode, value in columns.values()]
        body.append([f"{chunk_len:,}", f"{resident:,}", *cells])
    return table(["chunk", "resident", *columns], body)


def references(sources: list[Path]) -> str:
    """Microseconds that each further chunk adds to a request."""
    columns = {
        "hit, nothing evicted": ("lazy", "warm", "us_per_further_chunk"),
        "hit, full pool": ("lazy", "evicting", "us_per_further_chunk"),
        "a miss adds": ("lazy", "evicting", "us_per_fill"),
        "mean, full pool": ("lazy", "evicting", "us_on_average"),
        "stock, warm": ("stock", "warm", "us_per_further_chunk"),
    }
    return per_chunk(sources, columns)


def loaded(sources: list[Path]) -> str:
    """Microseconds that each further chunk adds to a request, with and without a host tier."""
    columns = {
        "no host tier, full pool": ("lazy", "evicting", "us_on_average"),
        "host tier, resident": ("lazy-tiers", "warm", "us_per_further_chunk"),
        "host tier, of all it has": ("lazy-tiers", "evicting", "us_on_average"),
    }
    return per_chunk(sources, columns)


def metered(sources: list[Path]) -> str:
    """Mean microseconds of a request per chunk, without and with metrics, and the time metrics take."""
    found = {}
    for row in (row for source in sources for row in lines(source) if "requests" in row):
        case = tuple(int(part) for part in row["shape"].split("x"))[::-1], row["resident"], row["mode"]
        found[case, row["contender"]] = row["us_per_chunk"]["mean"], row["steps_us_per_chunk"]["metrics"]["mean"]
    body = []
    for case in sorted({case for case, _ in found}, key=lambda case: (*case[:2], case[2] != "warm")):
        (chunk_len, chunks), resident, mode = case
        (without, _), (with_them, own) = found[case, "lazy"], found[case, "lazy-metrics"]
        pool = "full" if mode == "evicting" else "all resident"
        body.append([f"{chunks}x{chunk_len}", f"{resident:,}", pool, *map(number, (without, with_them, own))])
    return table(["request", "resident", "pool", "without metrics", "with metrics", "of these, publishing"], body)


def steps(sources: list[Path]) -> str:
    """Microseconds that each further chunk adds to a warm request, by step, one column for each file; then those of a
    full pool, of a missing chunk, and of a request of one chunk."""
    columns = {source.stem: _by_step(source) for source in sources}
    names = next(iter(columns.values()))
    body = [[name, *(spread(column[name]) for column in columns.values())] for name in names]
    return table(["", *columns], body)


def _by_step(source: Path) -> dict[str, list[float]]:
    """The values of all runs in a file. Each run has one contender, chunk length and number of resident chunks, and
    requests for one chunk and for several."""
    rows = [row for row in lines(source) if "environment" not in row]
    sums = [row for row in rows if "shape" not in row]
    warm = [row for row in rows if "shape" in row and row["mode"] == "warm"]
    ones = [row for row in warm if row["shape"].startswith("1x")]
    found: dict[str, list[float]] = collections.defaultdict(list)
    for one, more in zip(ones, [row for row in warm if row not in ones], strict=True):
        chunks = int(more["shape"].partition("x")[0])
        for step in STEPS:
            first, each = one["steps_us_per_chunk"][step]["p50"], more["steps_us_per_chunk"][step]["p50"]
            found[step].append((chunks * each - first) / (chunks - 1))
    found["all"] = [row["us_per_further_chunk"] for row in sums if row["mode"] == "warm"]
    found["all, in a full pool"] = [row["us_per_further_chunk"] for row in sums if row["mode"] == "evicting"]
    found["computing one that is missing"] = [row["us_per_fill"] for row in sums if row["mode"] == "evicting"]
    found["a request of one chunk, warm"] = [row["us_per_chunk"]["p50"] for row in ones]
    return found


def requests(sources: list[Path]) -> str:
    """Milliseconds of a request's host time, and microseconds per chunk's worth of evicted tokens."""
    found = values(sources)
    names = in_order(key[0] for key in found)
    columns = {
        "warm, ms": ("warm", "ms_per_request_p50"),
        "full pool, ms": ("evicting", "ms_per_request_p50"),
        "eviction, µs": ("evicting", "us_per_evicted"),
    }
    cases = {(key[1], key[3]) for key in found if isinstance(key[1], str)}
    body = []
    for shape, resident in sorted(cases, key=lambda case: ([int(part) for part in case[0].split("x")][::-1], case[1])):
        of = [found[name, shape, mode, resident][column] for mode, column in columns.values() for name in names]
        body.append([shape, f"{resident:,}", *(number(statistics.median(each)) if each else "" for each in of)])
    return table(["request", "resident", *(f"{what}: {name}" for what in columns for name in names)], body)

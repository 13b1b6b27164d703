"""The table of chunk hit rates for several servers behind a router."""

from pathlib import Path

from benchmark.report.cells import lines, number, only, table


def routing(sources: list[Path]) -> str:
    """The share of chunks found cached, the load of the busiest worker, and requests per second, by traffic."""
    rows = [row for source in sources for row in lines(source) if "policy" in row]
    traffics = list(dict.fromkeys(row["traffic"] for row in rows))
    body = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        found = [only([row for row in rows if (row["policy"], row["traffic"]) == (policy, t)]) for t in traffics]
        rates = [f"{row['chunk_hit_rate']:.0%}" for row in found]
        loads = [f"{row['busiest']:.2f}" for row in found]
        speeds = [number(row["requests_per_s"]) for row in found]
        body.append([policy, *rates, *loads, *speeds])
    titles = [f"{what}: {t}" for what in ("chunks cached", "busiest", "requests/s") for t in traffics]
    return table(["policy", *titles], body)

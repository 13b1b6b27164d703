"""Tables of the benchmarks with many cached chunks."""

from pathlib import Path

from benchmark.report.cells import lines, number, table


def calls(sources: list[Path]) -> str:
    """The times of a server's routes, and the pauses between tokens of a request that is decoding."""
    columns = ("ms_p50", "ms_max", "seconds", "pause_ms_p50", "pause_ms_max")
    rows = [row for source in sources for row in lines(source) if "calls" in row]
    body = [
        [f"`{row['what']}`", str(row["calls"]), *(number(row[c]) if c in row else "" for c in columns)] for row in rows
    ]
    return table(
        ["call", "calls", "ms, median", "ms, longest", "s, all", "pause, ms, median", "pause, ms, longest"], body
    )


def memory(sources: list[Path]) -> str:
    """The memory that a process gains per chunk."""
    rows = [row for source in sources for row in lines(source) if "bytes_per_chunk" in row]
    return table(["memory", "bytes a chunk"], ([row["what"], f"{row['bytes_per_chunk']:,}"] for row in rows))


def pieces(sources: list[Path]) -> str:
    """The scheduler's time between two batches, and in total, for one survey, page, set of gauges or deletion."""
    body = [
        [row["what"], f"{row['chunks']:,}", number(row["ms_p99"]), number(row["ms_max"]), number(row["ms_all"])]
        for source in sources
        for row in lines(source)
        if "ms_all" in row
    ]
    return table(["what", "chunks", "at once, ms, p99", "at once, ms, longest", "in all, ms"], body)

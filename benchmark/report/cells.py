"""Helpers for tables: Markdown, numbers, and rows of results."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

ORDER = (
    "lazy",
    "lazy-host",
    "lazy-plain",
    "copy",
    "stock",
    "stock-host",
    "stock-again",
    "stock-no-cache",
    "stock-flashinfer",
)


def table(header: list[str], body: Iterable[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *body))


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def spread(values: list[float]) -> str:
    """The median, with the range if there are several values; blank if there are none."""
    if not values:
        return ""
    median = number(statistics.median(values))
    return median if len(values) == 1 else f"{median} ({number(min(values))} to {number(max(values))})"


def in_order(names: Iterable[str]) -> list[str]:
    """Distinct contenders, ours first."""
    return sorted(set(names), key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def only(values: list):
    if len(values) != 1:
        raise ValueError(f"expected one row, got {len(values)}")
    return values[0]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def folders(sources: list[Path]) -> list[Path]:
    """Results folders of bench.py."""
    return sorted(path.parent for source in sources for path in source.rglob("environment.json"))

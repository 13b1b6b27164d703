"""Draws the figures of results folders, each with every contender, as PNG and SVG.

    python -m benchmark.serving.plots results/core results/pools --out results/plots

A figure is drawn for each set of rows that differ only in its x axis, if there are at least two values.
Published numbers come from published.json and are drawn as separate, marked curves.
"""

import argparse
import dataclasses
import itertools
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
OURS = "lazy"
SAMPLE_SIZES = {"num_prompts", "cold_prompts", "warm", "rounds"}
"""Parameters that say how much was measured, not what."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A column of the rows of one phase, against the figure's x."""

    label: str
    column: str
    phase: str = "steady"
    log: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """Rows with these columns, equal except for `varies` (columns or parameters)."""

    name: str
    x_label: str
    x: Callable[[dict], float | None]
    varies: frozenset[str]
    panels: tuple[Panel, ...]


TTFT = Panel("TTFT p50, ms", "ttft_ms_p50", log=True)
THROUGHPUT = Panel("throughput, requests/s", "request_throughput")
FIGURES = (
    Figure(
        "rate",
        "request rate, 1/s",
        lambda row: row["request_rate"],
        frozenset({"request_rate"}),
        (TTFT, Panel("TTFT p99, ms", "ttft_ms_p99", log=True), THROUGHPUT),
    ),
    Figure(
        "pool",
        "KV pool, GB",
        lambda row: row["kv_pool_gb"],
        frozenset({"kv_pool_gb"}),
        (Panel("hit rate, share of prompt tokens", "hit_rate"), TTFT, THROUGHPUT),
    ),
    Figure(
        "context",
        "prompt, tokens",
        lambda row: row["prompt_tokens"] / row["requests"] if row["workload"] == "latency" else None,
        frozenset({"chunks", "chunk_len"}),
        tuple(
            Panel(f"TTFT p50, ms: {phase}", "ttft_ms_p50", phase, log=True)
            for phase in ("cold", "same order", "reordered")
        ),
    ),
    Figure(
        "skew",
        "Zipf exponent",
        lambda row: row["parameters"].get("alpha"),
        frozenset({"alpha"}),
        (
            TTFT,
            THROUGHPUT,
            Panel(f"TTFT p50 / that of {OURS}", "ttft_ratio"),
            Panel(f"throughput of {OURS} / throughput", "throughput_ratio"),
        ),
    ),
)


def read_rows(folders: list[Path]) -> list[dict]:
    """All rows of the folders. Raises ValueError if there are none."""
    rows = []
    for folder in folders:
        try:
            lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ValueError(f"{folder} is no results folder: {error.strerror}: {error.filename}") from None
        rows += map(json.loads, lines)
    return rows


def where_measured(folder: Path) -> str:
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    return f"{environment['gpu'] or environment['machine']}, commit {environment['commit']}"


def what_was_measured(row: dict, varies: frozenset[str] = frozenset()) -> str:
    """A key that is equal for comparable rows: rows of one case, except for `varies`."""
    parameters = {key: value for key, value in row["parameters"].items() if key not in SAMPLE_SIZES | varies}
    columns = ("kv_pool_gb", "request_rate", "max_concurrency")
    parameters |= {column: row[column] for column in columns if column not in varies and row[column] is not None}
    return ", ".join(
        [row["model"], row["workload"], *(f"{key.replace('_', ' ')} {value}" for key, value in parameters.items())]
    )


def with_ratios(rows: list[dict]) -> list[dict]:
    """The rows, each with the factors by which our TTFT and throughput are better, if ours were measured as well."""
    ours = {(what_was_measured(row), row["phase"]): row for row in rows if row["contender"] == OURS}
    found = []
    for row in rows:
        mine = ours.get((what_was_measured(row), row["phase"]))
        if mine and row["contender"] != OURS:
            ttft = row["ttft_ms_p50"] / mine["ttft_ms_p50"]
            throughput = mine["request_throughput"] / row["request_throughput"]
            row = {**row, "ttft_ratio": ttft, "throughput_ratio": throughput}
        found.append(row)
    return found


def groups(rows: list[dict], figure: Figure) -> dict[str, list[dict]]:
    """The rows of each drawing of `figure`, by what was measured."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        if figure.x(row) is not None:
            found.setdefault(what_was_measured(row, figure.varies), []).append(row)
    return {name: group for name, group in found.items() if len({figure.x(row) for row in group}) > 1}


def draw(figure: Figure, title: str, rows: list[dict], colors: dict[str, str]) -> matplotlib.figure.Figure:
    """colors: of each contender, in legend order."""
    drawing, axes = plt.subplots(1, len(figure.panels), figsize=(4.4 * len(figure.panels), 4), layout="constrained")
    for axis, panel in zip(axes, figure.panels, strict=True):
        for name, color in colors.items():
            points = sorted(
                (figure.x(row), row[panel.column])
                for row in rows
                if row["contender"] == name and row["phase"] == panel.phase and panel.column in row
            )
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=4, color=color, label=name)
        if published := PUBLISHED.get(panel.column):
            style = "--" if panel.column == "ttft_ratio" else ":"
            axis.axhline(published["value"], color="black", linestyle=style, linewidth=1, label=published["label"])
        axis.set_xlabel(figure.x_label)
        axis.set_ylabel(panel.label)
        if panel.log:
            axis.set_yscale("log")
            axis.yaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 3, 5)))
            for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
                ticks(matplotlib.ticker.FormatStrFormatter("%g"))
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
    drawing.suptitle("\n".join(textwrap.wrap(title, 45 * len(axes))), fontsize=8)
    return drawing


def draw_all(folders: list[Path], out: Path) -> list[Path]:
    """The PNG files written, with an SVG beside each. Raises ValueError if there are no results."""
    rows = with_ratios(read_rows(folders))
    colors = {name: f"C{number}" for number, name in enumerate(dict.fromkeys(row["contender"] for row in rows))}
    where = "; ".join(dict.fromkeys(map(where_measured, folders)))
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for figure in FIGURES:
        for number, (title, group) in zip(itertools.count(1), groups(rows, figure).items()):
            drawing = draw(figure, f"{title}; {where}", group, colors)
            path = out / f"{figure.name}-{group[0]['workload']}-{number}.png"
            for file in (path, path.with_suffix(".svg")):
                drawing.savefig(file, dpi=130)
            plt.close(drawing)
            written.append(path)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="results folders of bench.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args()
    try:
        written = draw_all(args.folders, args.out)
    except ValueError as error:
        parser.error(str(error))
    print(*written, sep="\n")
    if not written:
        sys.exit("no figure: no parameter was measured at two values")


if __name__ == "__main__":
    main()

"""Tables of `python -m benchmark.kernels`."""

import collections
import json
from pathlib import Path

from benchmark.report.cells import number, table


def kernels(sources: list[Path], family: str) -> str:
    """Milliseconds of FlashInfer's faster kernel, and every implementation's time as a multiple of it; blank where an
    implementation does not take a shape."""
    body = []
    shapes = _by_shape(sources, family)
    rows = [row for found in shapes.values() for row in found if "refused" not in row and not row["baseline"]]
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for shape, found in shapes.items():
        of = {row["implementation"]: row for row in found if "refused" not in row}
        timed = {name: row for name, row in of.items() if "p50" in row}
        baseline = min((row for row in timed.values() if row["baseline"]), key=lambda row: row["p50"])
        ratios = [f"{timed[name]['ratio']:.2f}" if name in timed else "failed" if name in of else "" for name in names]
        body.append([shape, f"{baseline['p50']:.4f}", baseline["implementation"], *ratios])
    return table(["batch", "FlashInfer, ms", "its kernel", *names], body)


def window_rows(sources: list[Path]) -> str:
    """Milliseconds per decode step of `window_rows`, and of attention in the layers that share its rows."""
    body = []
    for shape, found in _by_shape(sources, "rows").items():
        of = {row["op"]: row for row in reversed(found) if "p50" in row}  # the first of each: not of an fp8 cache
        listing, layer = of["window_rows"], of["decode"]
        layers_ms = layer["layers"] * layer["p50"]
        share = f"{listing['p50'] / layers_ms:.1%}"
        body.append([shape, f"{listing['p50']:.4f}", str(layer["layers"]), f"{layers_ms:.4f}", share])
    return table(["batch", "`window_rows`, ms", "layers", "their attention, ms", "ratio"], body)


def _by_shape(sources: list[Path], family: str) -> dict[str, list[dict]]:
    results = [json.loads(source.read_text(encoding="utf-8")) for source in sources]
    shapes = collections.defaultdict(list)
    for row in (row for result in results for row in result["rows"] if row["family"] == family):
        shapes[row["shape"]].append(row)
    return shapes


def recurrent(sources: list[Path]) -> str:
    """What benchmark/kernels/recurrent.py wrote: a request's time in the recurrent layers of a model."""
    rows = [row for source in sources for row in json.loads(source.read_text(encoding="utf-8"))["rows"]]
    body = [
        [row["case"], f"{row['tokens']:,}", number(row["gpu_ms"]["p50"]), number(row["wall_ms"]["p50"])] for row in rows
    ]
    return table(["request", "tokens computed", "GPU, ms", "with launches, ms"], body)

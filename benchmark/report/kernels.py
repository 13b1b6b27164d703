"""Tables of `python -m sgl_kernel_lazy.bench`."""

import collections
import json
from pathlib import Path

from benchmark.report.cells import table


def kernels(sources: list[Path], family: str) -> str:
    """Milliseconds of FlashInfer's faster kernel, and every implementation's time as a multiple of it."""
    results = [json.loads(source.read_text(encoding="utf-8")) for source in sources]
    rows = [row for result in results for row in result["rows"] if row["family"] == family]
    shapes = collections.defaultdict(list)
    for row in rows:
        shapes[row["shape"]].append(row)
    names = list(dict.fromkeys(row["implementation"] for row in rows if not row["baseline"]))
    body = []
    for shape, found in shapes.items():
        of = {row["implementation"]: row for row in found if "p50" in row}
        baseline = min((row for row in of.values() if row["baseline"]), key=lambda row: row["p50"])
        ratios = [f"{of[name]['ratio']:.2f}" if name in of else "failed" for name in names]
        body.append([shape, f"{baseline['p50']:.4f}", baseline["implementation"], *ratios])
    return table(["batch", "FlashInfer, ms", "its kernel", *names], body)

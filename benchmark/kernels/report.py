"""The header, table, JSON and plot of a run."""

import argparse
import json
import pathlib
import subprocess
import sys
from typing import Any

import torch

COLUMNS = dict(
    p20="8.4f", p50="8.4f", p80="8.4f", gb_per_s="7.0f", of_read="7.0%", of_copy="7.0%", ratio="6.3f",
    plan_ms="8.3f", step_ms="8.2f",
)  # fmt: skip


def header(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The facts needed to judge or repeat the numbers."""
    versions: dict[str, str | None] = {}
    for name in ("triton", "flashinfer"):
        try:
            versions[name] = __import__(name).__version__
        except ImportError:
            versions[name] = None
    smi: dict[str, str | None] = {"driver_version": None, "power.limit": None, "clocks.max.sm": None}
    if device.type == "cuda":
        done = _run("nvidia-smi", f"--query-gpu={','.join(smi)}", "--format=csv,noheader", f"--id={device.index or 0}")
        smi = dict(zip(smi, (done or "").split(", "), strict=False)) if done else smi
    return dict(
        gpu=torch.cuda.get_device_name(device) if device.type == "cuda" else "none, wall-clock times on CPU",
        driver=smi.get("driver_version"), power_limit=smi.get("power.limit"), max_clock=smi.get("clocks.max.sm"),
        python=sys.version.split()[0], torch=torch.__version__, **versions,
        commit=arguments.commit or _run("git", "-C", str(pathlib.Path(__file__).parent), "rev-parse", "HEAD"),
        seed=arguments.seed, command=" ".join(["python -m benchmark.kernels", *sys.argv[1:]]),
    )  # fmt: skip


def _run(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def finish_rows(rows: list[dict], bandwidth: dict) -> None:
    """Add bandwidths, and ratios to the better baseline, to the rows of one shape."""
    floor = min((row["p50"] for row in rows if row["baseline"] and "p50" in row), default=None)
    for row in rows:
        if "p50" in row and row["bytes"]:
            row["gb_per_s"] = row["bytes"] / row["p50"] / 1e6
            row.update({f"of_{name}": row["gb_per_s"] / rate for name, rate in bandwidth.items()})
            if floor:
                row["ratio"] = row["p50"] / floor


def print_rows(rows: list[dict]) -> None:
    """The rows of one shape below its name; columns that do not apply are blank."""
    print(f"\n{rows[0]['shape']}\n{'':20}" + " ".join(f"{name:>{width(form)}}" for name, form in COLUMNS.items()))
    for row in rows:
        cells = (f"{row[c]:{form}}" if c in row else " " * width(form) for c, form in COLUMNS.items())
        print(f"{row['implementation']:<20}" + (row.get("failed") or row.get("refused") or " ".join(cells)), flush=True)


def width(form: str) -> int:
    return max(int(form.split(".")[0]), 7)


def write_json(path: pathlib.Path, result: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def plot(path: pathlib.Path, result: dict) -> None:
    """Per family, p50 of every implementation over the better baseline's; milliseconds where there is none."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    families = list(dict.fromkeys(row["family"] for row in result["rows"]))
    figure, axes = plt.subplots(len(families), squeeze=False, figsize=(11, 3.6 * len(families)), layout="constrained")
    for axis, family in zip(axes[:, 0], families, strict=True):
        rows = [row for row in result["rows"] if row["family"] == family and "p50" in row]
        measure = "ratio" if all("ratio" in row for row in rows) else "p50"
        names = list(dict.fromkeys(row["shape"] for row in rows))
        kinds = list(dict.fromkeys(row["implementation"] for row in rows))
        for k, kind in enumerate(kinds):
            mine = [row for row in rows if row["implementation"] == kind]
            at = [names.index(row["shape"]) + (k - (len(kinds) - 1) / 2) * 0.8 / len(kinds) for row in mine]
            axis.bar(at, [row[measure] for row in mine], 0.8 / len(kinds), label=kind)
        axis.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=7)
        axis.set_ylabel("time / better baseline" if measure == "ratio" else "milliseconds")
        if measure == "ratio":
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.set_ylim(0, min(4.0, 1.1 * max((row[measure] for row in rows), default=1.0)))
        axis.set_title(f"{family}, {result['header']['gpu']}", fontsize=9)
        axis.legend(fontsize=7, ncols=len(kinds))
    figure.savefig(path, dpi=130)

"""Draws how much of the gap between `block` and `full` each policy closes, against the share of tokens it recomputes.

python -m research.policies.plots results.jsonl [more.jsonl ...] --out policies.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmark.report.means import load, row

CURVES = {
    "base+query": (
        "base",
        "base+query:ratio=0.05",
        "base+query:ratio=0.15",
        "base+query:ratio=0.2",
        "base+query:ratio=0.3",
    ),
    "base+query, static": ("base", "base+query:ratio=0.15,static=0.05", "base+query:ratio=0.2,static=0.1"),
    "query": ("block", "query:ratio=0.15"),
    "base+static": ("base", "base+static:ratio=0.15", "base+static:ratio=0.2"),
    "static": ("block", "static:ratio=0.15"),
    "base+epic": ("base", "base+epic:tokens=16"),
    "epic": ("block", "epic:tokens=16"),
    "base+blend": ("base", "base+blend:ratio=0.15"),
}
"""Policies by kind, in order of how much they recompute."""
PANELS = {"closed": "NLL of the gold answer", "own_kl_closed": "KL over full attention's own answer"}


def draw(paths: list[Path], out: Path) -> None:
    lines = load(paths)
    figure, panels = plt.subplots(1, len(PANELS), figsize=(11, 4), sharey=True, layout="constrained")
    for panel, (measure, title) in zip(panels, PANELS.items(), strict=True):
        for label, policies in CURVES.items():
            rows = [row(policy, lines) for policy in policies]
            shares, values = [100 * each["share"] for each in rows], [100 * each[measure] for each in rows]
            bounds = [[100 * end for end in each[f"{measure}_interval"]] for each in rows]
            below = [value - low for value, (low, _) in zip(values, bounds, strict=True)]
            above = [high - value for value, (_, high) in zip(values, bounds, strict=True)]
            panel.errorbar(shares, values, [below, above], label=label, marker="o", capsize=2, elinewidth=0.7)
        for value, name in ((0, "block"), (100, "full")):
            panel.axhline(value, color="black", linestyle="--", linewidth=1)
            panel.text(0.99, value + 2, name, ha="right", transform=panel.get_yaxis_transform())
        panel.set(title=title, xlabel="chunk tokens recomputed, %", ylim=(-20, 120))
    panels[0].set_ylabel("gap closed, %, with 95% intervals")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(out, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    draw(args.results, args.out)


if __name__ == "__main__":
    main()

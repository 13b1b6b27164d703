"""Which prompts have the gap in NLL that policies leave to full attention, and whose greedy answers they change."""

from pathlib import Path

from benchmark.report.cells import table
from benchmark.report.means import carriers, load
from benchmark.report.policies import common
from research.report.studies import PARTS, divided

POLICIES = ("block", "base", "base+query:ratio=0.15", "base+query:ratio=0.2", "base+static:ratio=0.15")


def policies_remaining(sources: list[Path]) -> str:
    """How few prompts make most of each policy's gap, and what share of it lies in parts of the prompts. A prompt's gap
    is its NLL per token less that of `full`."""
    lines = common(load(sources))
    full = lines["full"]
    gaps = {
        name: {prompt: line["nll"] - full[prompt]["nll"] for prompt, line in lines[name].items()} for name in POLICIES
    }

    def few(count: int) -> str:
        return f"{count} ({count / len(full):.0%})"

    body = [
        ["mean gap", "", *(f"{sum(of.values()) / len(full):.3f}" for of in gaps.values())],
        ["prompts that have 80% of it", "", *(few(carriers(list(of.values()), 0.8)) for of in gaps.values())],
        ["prompts without a gap", "", *(few(sum(gap <= 0 for gap in of.values())) for of in gaps.values())],
    ]
    for kind in PARTS:
        for part, prompts in divided(full, kind).items():
            shares = (sum(of[prompt] for prompt in prompts) / sum(of.values()) for of in gaps.values())
            body.append([f"{kind}: {part}", few(len(prompts)), *(f"{share:.0%}" for share in shares)])
    return table(["", "prompts", *(f"`{name}`" for name in gaps)], body)


def policies_changes(sources: list[Path]) -> str:
    """How greedy answers differ from those of `full`, by prompt, and what that does to the mean F1, in points."""
    lines = load(sources)
    body = []
    for name in [name for name in lines if name != "full" and all("f1" in line for line in lines[name].values())]:
        pairs = [(line, lines["full"][prompt]) for prompt, line in lines[name].items()]
        same = sum(mine["answer"] == its["answer"] for mine, its in pairs)
        changes = [mine["f1"] - its["f1"] for mine, its in pairs]
        lower, higher = ([change for change in changes if change * sign > 0] for sign in (-1, 1))
        zero = sum(its["f1"] > mine["f1"] == 0 for mine, its in pairs)
        points = [f"{len(some)}, {100 * sum(some) / len(pairs):+.1f}" for some in (lower, higher)]
        body.append([f"`{name}`", f"{len(pairs):,}", str(same), points[0], str(zero), points[1]])
    return table(
        ["policy", "prompts", "same answer", "lower F1, points", "of these to zero", "higher F1, points"], body
    )

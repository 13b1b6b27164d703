"""Tables of `python -m research.policies.served`."""

import itertools
from pathlib import Path

from benchmark.report.cells import lines, table

MARGINS = (0, 0.01, 0.03, 0.1, 0.3, float("inf"))
"""The bins of the oracle's margins, in log-probability."""
Step = tuple[float, float, float]
"""The oracle's margin, and the deficits of the server's token and of plain PyTorch's."""


def policies_served(sources: list[Path]) -> str:
    """How many tokens are not the oracle's best: by policy, by phase if there are several, and of all."""
    found = [line for source in sources for line in lines(source)]
    body = []
    for policy in dict.fromkeys(line["policy"] for line in found):
        body.append([f"`{policy}`", *cells(steps([line for line in found if line["policy"] == policy]))])
    phases = dict.fromkeys(line["phase"] for line in found)
    for phase in phases if len(phases) > 1 else ():
        body.append([f"all, {phase}", *cells(steps([line for line in found if line["phase"] == phase]))])
    body.append(["all", *cells(steps(found))])
    return table(["policy", *HEADS], body)


def policies_margins(sources: list[Path]) -> str:
    """The same by the oracle's margin."""
    found = steps([line for source in sources for line in lines(source)])
    body = []
    for low, high in itertools.pairwise(MARGINS):
        name = f"{low} to {high}" if high < MARGINS[-1] else f"over {low}"
        body.append([name, *cells([step for step in found if low <= step[0] < high])])
    return table(["oracle's best token leads by", *HEADS], body)


HEADS = (
    "steps",
    "server: other token",
    "plain PyTorch: other token",
    "server: furthest below",
    "plain: furthest below",
)


def steps(found: list[dict]) -> list[Step]:
    return [
        step for line in found for step in zip(line["margins"], line["deficits"], line["plain_deficits"], strict=True)
    ]


def cells(of: list[Step]) -> list[str]:
    """The number of steps, and for server and plain PyTorch the share of other tokens and the largest deficit."""
    served, plain = ([step[which] for step in of] for which in (1, 2))
    shares = (f"{sum(value > 0 for value in values) / len(of):.1%}" if of else "" for values in (served, plain))
    return [f"{len(of):,}", *shares, *(f"{max(values, default=0):.2g}" for values in (served, plain))]

"""Tables of `python -m research.policies.evaluate`: studies, parts of the prompts, and differences prompt by prompt."""

import bisect
import collections
from collections.abc import Sequence
from pathlib import Path

from benchmark.report.cells import table
from benchmark.report.means import load, paired, row
from benchmark.report.policies import Prompt, between, common, share

STUDIES = {
    "layers": r"base\+query:ratio=0\.15,layers=.+",
    "statics": r"(base\+)?static:.+",
    "preambles": r"base:preamble=\w+",
    "weights": r"base|packet|trained .+",
}
"""The policies of each study, as a pattern."""
PAIRS = (
    ("base", "block"),
    ("base+query:ratio=0.05", "base"),
    ("base+query:ratio=0.15", "base+query:ratio=0.05"),
    ("base+query:ratio=0.3", "base+query:ratio=0.15"),
    ("base+query:ratio=0.15", "query:ratio=0.15"),
    ("base+query:ratio=0.15", "base+epic:tokens=16"),
    ("base+query:ratio=0.15", "base+blend:ratio=0.15"),
    ("base+query:ratio=0.15", "base+static:ratio=0.15"),
    ("base+query:ratio=0.15,static=0.05", "base+query:ratio=0.15"),
    ("base+query:ratio=0.15,static=0.05", "base+static:ratio=0.15"),
    ("base+static:ratio=0.15", "base"),
    ("base", "epic:tokens=16"),
)
"""Which policies are compared with which."""
PARTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "set": ("group", ()),
    "prompt": ("prompt_tokens", (0, 1000, 2000, 8192)),
    "gold answer": ("answer_tokens", (0, 1, 4, 10, 512)),
}
"""What prompts are divided by: a key of an evaluation's line, and the edges of its bins, in tokens."""


def policies_by(sources: list[Path], kind: str) -> str:
    """The share of the gap that policies close, by data set or by length."""
    lines = common(load(sources))
    parts = divided(lines["full"], kind)
    body = []
    for policy in between(lines):
        rows = [
            row(policy, {name: {prompt: of[prompt] for prompt in prompts} for name, of in lines.items()})
            for prompts in parts.values()
        ]
        body.append(
            [f"`{policy}`", *(share(each)(measure) for measure in ("closed", "own_kl_closed") for each in rows)]
        )
    heads = [
        f"{measure}: {part}, {len(prompts)} prompts" for measure in ("NLL", "own KL") for part, prompts in parts.items()
    ]
    return table(["policy", *heads], body)


def divided(full: dict[Prompt, dict], kind: str) -> dict[str, list[Prompt]]:
    """The prompts of each part, in order.  full: their lines under `full`."""
    key, edges = PARTS[kind]
    parts = collections.defaultdict(list)
    for prompt in sorted(full, key=lambda prompt: full[prompt][key]):
        parts[bin_of(full[prompt][key], edges) if edges else full[prompt][key]].append(prompt)
    return parts


def bin_of(tokens: int, edges: Sequence[int]) -> str:
    """The bounds of the bin that has this many tokens: more than one of the sorted edges, and at most the next."""
    edge = bisect.bisect_left(edges, tokens)
    low, high = edges[edge - 1] + 1, edges[edge]
    return f"{low:,} to {high:,} tokens" if low < high else f"{low:,} token{'s' * (low > 1)}"


def policies_paired(sources: list[Path]) -> str:
    """Differences between the pairs of policies in `PAIRS`, prompt by prompt."""
    lines = common(load(sources))
    body = []
    for name, other in PAIRS:
        found = [paired(name, other, measure, lines) for measure in ("nll", "own_kl")]
        body.append(
            [f"`{name}`", f"`{other}`", *(f"{mean:+.3f} ({low:+.3f} to {high:+.3f})" for mean, low, high in found)]
        )
    return table(["policy", "against", "NLL", "own KL"], body)

"""Tables of what `python -m research.quality.acceptance` wrote: how many drafts are accepted."""

import collections
from pathlib import Path

import numpy as np

from benchmark.report.cells import lines, table
from benchmark.report.means import interval

SAMPLES, SEED = 10_000, 0
Accepted = list[list[int]]
"""For each prompt, how many verifications accepted 0, 1, ... drafts."""


def mean_length(accepted: Accepted) -> float:
    """Tokens for each verification, with the one that the target adds."""
    tokens, steps = totals(accepted)
    return float(tokens.sum() / steps.sum())


def totals(accepted: Accepted) -> tuple[np.ndarray, np.ndarray]:
    """Of each prompt, the tokens that verifications gave, and how many there were."""
    tokens = [sum(count * length for length, count in enumerate(prompt, start=1)) for prompt in accepted]
    return np.array(tokens), np.array([sum(prompt) for prompt in accepted])


def relative(accepted: Accepted, other: Accepted) -> tuple[float, float]:
    """The 95% interval of one mean length divided by another's, from resampling the prompts that both were given."""
    drawn = np.random.default_rng(SEED).integers(len(other), size=(SAMPLES, len(other)))
    ratios = [tokens[drawn].sum(1) / steps[drawn].sum(1) for tokens, steps in map(totals, (accepted, other))]
    return interval(ratios[0] / ratios[1])


def acceptance(sources: list[Path]) -> str:
    """A row for each kind of prompts, and for each draft its mean length, also relative to the first kind."""
    found: dict[str, dict[str, Accepted]] = collections.defaultdict(dict)
    for line in (line for source in sources for line in lines(source) if "prompts" in line):
        found[line["prompts"]][line["draft"]] = line["accepted"]
    drafts = list(dict.fromkeys(draft for by_draft in found.values() for draft in by_draft))
    plain, *_ = found.values()
    body = []
    for prompts, by_draft in found.items():
        row = [prompts]
        for draft in drafts:
            own, other = by_draft[draft], plain[draft]
            low, high = relative(own, other)
            share = mean_length(own) / mean_length(other)
            row += [f"{mean_length(own):.2f}", "" if own is other else f"{share:.1%} ({low:.1%} to {high:.1%})"]
        body.append(row)
    return table(["prompts", *(head for draft in drafts for head in (f"`{draft}`", "of plain"))], body)

"""Tables of `python -m research.policies.evaluate`."""

import collections
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmark.report.cells import table
from benchmark.report.means import RESAMPLES, interval, load, paired, relative, row

MEANS = {"nll": "nll", "kl": "own_kl"}
"""The measures of `policies_means`: the table's name, and the key of an evaluation's line."""
Prompt = tuple[str, str]
"""Data set and id."""
Lines = dict[str, dict[Prompt, dict]]
"""lines[policy][prompt], as `load` returns them."""


def policies(sources: list[Path], pattern: str = "") -> str:
    """The share of the gap between `block` and `full` that policies close: see `common` for which."""
    lines = common(load(sources), pattern)
    body = []
    for each in (row(policy, lines) for policy in between(lines)):
        body.append([f"`{each['policy']}`", f"{each['share']:.0%}", *map(share(each), ("closed", "own_kl_closed"))])
    return table([f"policy, {len(lines['full']):,} prompts", "recomputed", "NLL gap closed", "own KL closed"], body)


def policies_answers(sources: list[Path], pattern: str = "") -> str:
    """Exact match and F1 of the policies that answered greedily; F1 also as a share of that of `full`, against it
    prompt by prompt in percentage points, and by data set."""
    lines = common(load(sources), pattern)
    sizes = collections.Counter(group for group, _ in lines["full"])
    body = []
    for name in [name for name in lines if all("f1" in line for line in lines[name].values())]:
        each = row(name, lines)
        mean, low, high = (100 * points for points in paired(name, "full", "f1", lines))
        part, least, most = (100 * shares for shares in relative(name, "full", "f1", lines))
        change = [f"{part:.1f}% ({least:.0f}% to {most:.0f}%)", f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"]
        sums: dict[str, float] = collections.Counter()
        for (group, _), line in lines[name].items():
            sums[group] += line["f1"]
        by_group = [f"{sums[group] / size:.1%}" for group, size in sizes.items()]
        body.append(
            [
                f"`{name}`",
                f"{each['n']:,}",
                *map(share(each, 1), ("em", "f1")),
                *(change if name != "full" else ("", "")),
                *by_group,
            ]
        )
    heads = [f"F1: {group}, {size}" for group, size in sizes.items()]
    return table(["policy", "prompts", "exact match", "F1", "of `full`'s F1", "against `full`", *heads], body)


def policies_matches(sources: list[Path]) -> str:
    """Exact match of the policies that answered all prompts greedily: overall, the difference from `block` prompt by
    prompt in percentage points, and by data set."""
    lines = load(sources)
    sizes = collections.Counter(group for group, _ in lines["full"])
    body = []
    for name, answered in lines.items():
        if {prompt for prompt, line in answered.items() if "em" in line} == set(lines["full"]):
            found = row(name, lines)
            right = [sum(line["em"] for prompt, line in answered.items() if prompt[0] == group) for group in sizes]
            shares = [f"{count / size:.0%}" for count, size in zip(right, sizes.values(), strict=True)]
            mean, low, high = (100 * points for points in paired(name, "block", "em", lines))
            change = "" if name == "block" else f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
            body.append([f"`{name}`", f"{found['share']:.0%}", share(found)("em"), change, *shares])
    heads = [f"{group}, {size}" for group, size in sizes.items()]
    return table(["policy", "recomputed", f"all {len(lines['full']):,} prompts", "against `block`", *heads], body)


def policies_means(sources: list[Path], measure: str) -> str:
    """A measure's mean over all prompts, and by data set, of the policies that answered all prompts. KL is over the
    answer under `full`, whose own is left out."""
    lines = common(load(sources))
    sizes = collections.Counter(group for group, _ in lines["full"])
    draws = np.random.default_rng(0).integers(len(lines["full"]), size=(RESAMPLES, len(lines["full"])))
    body = []
    for name, answered in lines.items():
        if (name, measure) == ("full", "kl"):
            continue
        values = {prompt: line[MEANS[measure]] for prompt, line in answered.items()}
        low, high = interval(np.array(list(values.values()))[draws].mean(-1))
        of_groups = (np.mean([value for (each, _), value in values.items() if each == group]) for group in sizes)
        whole = f"{np.mean(list(values.values())):.3f} ({low:.3f} to {high:.3f})"
        body.append([f"`{name}`", whole, *(f"{mean:.3f}" for mean in of_groups)])
    heads = [f"{group}, {size}" for group, size in sizes.items()]
    return table(["policy", f"all {len(lines['full']):,} prompts", *heads], body)


def policies_comb(sources: list[Path]) -> str:
    """Exact match by data set, KL and memory, for a model under policies and for other models (named by prefixes) that
    answered the same prompts. KL is to each model's own full attention."""
    lines = load(sources)
    sizes = collections.Counter(group for group, _ in lines["full"])
    draws = np.random.default_rng(0).integers(len(lines["full"]), size=(RESAMPLES, len(lines["full"])))
    body = []
    for name, answered in lines.items():
        if {prompt for prompt, line in answered.items() if "em" in line} != set(lines["full"]):
            continue
        right = np.array([line["em"] for line in answered.values()])
        low, high = interval(right[draws].mean(-1))
        by_group = [
            f"{sum(line['em'] for prompt, line in answered.items() if prompt[0] == group) / size:.0%}"
            for group, size in sizes.items()
        ]
        (kv_bytes,) = {line["kv_bytes"] for line in answered.values()}
        divergence = np.mean([line["own_kl"] for line in answered.values()])
        recomputed = np.mean([line["share"] for line in answered.values()])
        whole = f"{right.mean():.0%} ({low:.0%} to {high:.0%})"
        body.append([f"`{name}`", f"{recomputed:.0%}", f"{kv_bytes:,}", f"{divergence:.3f}", whole, *by_group])
    heads = ["recomputed", "KV bytes per document token", "own KL", f"all {len(lines['full']):,} prompts"]
    return table(["policy", *heads, *(f"{group}, {size}" for group, size in sizes.items())], body)


def common(lines: Lines, pattern: str = "") -> Lines:
    """The policies that a regular expression matches, or all that answered the prompts of `block`, over the prompts
    that they all answered."""
    whole = {name for name in lines if lines[name].keys() >= lines["block"].keys()}
    chosen = {name for name in lines if re.fullmatch(pattern, name)} if pattern else whole
    names = [name for name in lines if name in {"full", "block"} | chosen]
    prompts = set.intersection(*(set(lines[name]) for name in names))
    return {name: {prompt: line for prompt, line in lines[name].items() if prompt in prompts} for name in names}


def between(lines: Lines) -> list[str]:
    return [name for name in lines if name not in ("full", "block")]


def share(found: dict, digits: int = 0) -> Callable[[str], str]:
    """A policy's measure in percent, with its interval."""

    def shown(measure: str) -> str:
        low, high = found[f"{measure}_interval"]
        return f"{found[measure]:.{digits}%} ({low:.{digits}%} to {high:.{digits}%})"

    return shown

"""Prints an evaluation's table: means over prompts, and how much of the gap from `block` to `full` policies close.

NLL and KL are over the gold answer's tokens; `own` marks those over the answer under full attention.

python -m benchmark.report.means results.jsonl [more.jsonl ...]
"""

import argparse
import collections
import json
from pathlib import Path

import numpy as np

RESAMPLES = 2000


def load(paths: list[Path]) -> dict[str, dict[tuple[str, str], dict]]:
    """lines[policy][prompt]: the record. Repeated records count once."""
    lines = collections.defaultdict(dict)
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            lines[line["policy"]][line["group"], line["id"]] = line
    return lines


def gap_closed(policy: np.ndarray, block: np.ndarray, full: np.ndarray) -> np.ndarray:
    """1 - (policy - full) / (block - full) for means along the last axis: 1 is full attention, 0 is block."""
    return 1 - (policy - full).mean(-1) / (block - full).mean(-1)


def interval(values: np.ndarray) -> tuple[float, float]:
    """The 95% percentile interval."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def row(name: str, lines: dict[str, dict[str, dict]], seed: int = 0) -> dict:
    """Means of one policy over the prompts that it, `block` and `full` have all answered, with intervals from
    resampling prompts. Keys: those of an evaluation's line; closed and own_kl_closed, of the gaps in NLL and own KL."""
    prompts = sorted(lines[name].keys() & lines["block"].keys() & lines["full"].keys())
    draws = np.random.default_rng(seed).integers(len(prompts), size=(RESAMPLES, len(prompts)))

    def column(policy: str, measure: str) -> np.ndarray:
        return np.array([lines[policy][prompt][measure] for prompt in prompts])

    result: dict = {"policy": name, "n": len(prompts), "share": column(name, "share").mean()}
    for measure in ("nll", "kl", "agree", "own_kl", "own_agree", "em", "f1"):
        if all(measure in lines[name][prompt] for prompt in prompts):
            values = column(name, measure)
            result |= {measure: values.mean(), f"{measure}_interval": interval(values[draws].mean(-1))}
    for closed, measure in (("closed", "nll"), ("own_kl_closed", "own_kl")):
        columns = [column(policy, measure) for policy in (name, "block", "full")]
        result |= {
            closed: gap_closed(*columns),
            f"{closed}_interval": interval(gap_closed(*(values[draws] for values in columns))),
        }
    return result


def paired(
    name: str, other: str, measure: str, lines: dict[str, dict[str, dict]], seed: int = 0
) -> tuple[float, float, float]:
    """The mean over prompts of one policy's measure minus another's, with its interval from resampling prompts."""
    prompts = sorted(lines[name].keys() & lines[other].keys())
    differences = np.array([lines[name][prompt][measure] - lines[other][prompt][measure] for prompt in prompts])
    draws = np.random.default_rng(seed).integers(len(prompts), size=(RESAMPLES, len(prompts)))
    return differences.mean(), *interval(differences[draws].mean(-1))


def relative(
    name: str, other: str, measure: str, lines: dict[str, dict[str, dict]], seed: int = 0
) -> tuple[float, float, float]:
    """One policy's mean over prompts divided by another's, with its interval from resampling prompts."""
    prompts = sorted(lines[name].keys() & lines[other].keys())
    mine, its = (np.array([lines[policy][prompt][measure] for prompt in prompts]) for policy in (name, other))
    draws = np.random.default_rng(seed).integers(len(prompts), size=(RESAMPLES, len(prompts)))
    return mine.mean() / its.mean(), *interval(mine[draws].mean(-1) / its[draws].mean(-1))


def carriers(gaps: list[float], share: float) -> int:
    """The fewest prompts whose gaps add up to `share` (of 1) of the sum of all, which negative ones reduce."""
    reached = np.cumsum(sorted(gaps, reverse=True)) >= share * sum(gaps)
    return int(reached.argmax()) + 1


def table(rows: list[dict]) -> str:
    """The rows as Markdown, shares in percent."""
    heads = {
        "share": ("recomputed", 100, 0),
        "nll": ("NLL", 1, 3),
        "closed": ("gap closed", 100, 0),
        "kl": ("KL", 1, 3),
        "own_kl": ("own KL", 1, 3),
        "own_kl_closed": ("own gap closed", 100, 0),
        "own_agree": ("own tokens", 100, 0),
        "em": ("EM", 100, 0),
        "f1": ("F1", 100, 1),
    }

    def cell(row: dict, measure: str, scale: float, digits: int) -> str:
        if measure not in row:
            return ""
        ends = row.get(f"{measure}_interval", ())
        return f"{scale * row[measure]:.{digits}f}" + (
            f" ({scale * ends[0]:.{digits}f} to {scale * ends[1]:.{digits}f})" if ends else ""
        )

    text = [f"| policy | n | {' | '.join(head for head, *_ in heads.values())} |", "|---" * (len(heads) + 2) + "|"]
    for row in rows:
        cells = [cell(row, measure, scale, digits) for measure, (_, scale, digits) in heads.items()]
        text.append(f"| `{row['policy']}` | {row['n']} | {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--by-group", action="store_true", help="a table for each file of questions")
    args = parser.parse_args()
    lines = load(args.results)
    groups = sorted({group for group, _ in lines["full"]}) if args.by_group else [None]
    for group in groups:
        chosen = {
            policy: {key: line for key, line in prompts.items() if group in (None, key[0])}
            for policy, prompts in lines.items()
        }
        print(f"\n## {group}\n" if group else "")
        print(table([row(policy, chosen) for policy in chosen if chosen[policy]]))


if __name__ == "__main__":
    main()

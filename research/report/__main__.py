"""Prints a table of a study.

python -m research.report paired results.jsonl
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

from benchmark.report.policies import policies, policies_answers
from research.report.mixtures import mixtures
from research.report.remaining import policies_changes, policies_remaining
from research.report.served import policies_margins, policies_served
from research.report.studies import PARTS, STUDIES, policies_by, policies_paired

KINDS: dict[str, Callable[[list[Path]], str]] = {
    "answers-weights": functools.partial(policies_answers, pattern=STUDIES["weights"]),
    "changes": policies_changes,
    "margins": policies_margins,
    "mixtures": mixtures,
    "paired": policies_paired,
    "remaining": policies_remaining,
    "served": policies_served,
    **{f"by-{kind.replace(' ', '-')}": functools.partial(policies_by, kind=kind) for kind in PARTS},
    **{study: functools.partial(policies, pattern=pattern) for study, pattern in STUDIES.items()},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("results", type=Path, nargs="+", help="what a command of research.policies has written")
    args = parser.parse_args()
    print(KINDS[args.kind](args.results), end="")


if __name__ == "__main__":
    main()

"""Writes the tables of docs/results from the data beside them.

    python -m benchmark.report

A page marks a table by `<!-- table KIND SOURCE... -->` and `<!-- end -->`; everything in between is replaced. A source
is a file or folder beside the page; a folder means every results folder of bench.py below it. `KINDS` lists the kinds,
with a `kernels-FAMILY` for each family of shapes of the kernel benchmark.
"""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmark.report.answers import answers
from benchmark.report.eviction import equal_memory, eviction
from benchmark.report.host_time import loaded, metered, references, requests, steps
from benchmark.report.kernels import kernels, recurrent, window_rows
from benchmark.report.many import calls, memory, pieces
from benchmark.report.policies import (
    MEANS,
    policies,
    policies_answers,
    policies_comb,
    policies_matches,
    policies_means,
)
from benchmark.report.routing import routing
from benchmark.report.runs import runs
from benchmark.report.serving import chat, chat_times, decode, documents, latency, load, phases, policy_costs, traces
from benchmark.report.speculation import acceptance
from benchmark.report.tiers import backups, copies, loads, precomputing

PAGES = Path(__file__).parents[2] / "docs" / "results"
MARK = re.compile(r"(<!-- table (\S+) ([^>]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FAMILIES = ("decode", "shared", "extend", "spans", "ragged", "heads", "windows", "gemma", "ropes")
KINDS: dict[str, Callable[[list[Path]], str]] = {
    **{kind.__name__: kind for kind in (runs, latency, load, documents, chat, decode, references, requests, answers)},
    **{
        kind.__name__: kind
        for kind in (phases, loads, copies, backups, eviction, routing, calls, memory, pieces, loaded)
    },
    **{kind.__name__: kind for kind in (metered, traces, steps, precomputing, acceptance, recurrent)},
    **{
        kind.__name__.replace("_", "-"): kind
        for kind in (
            policies,
            policies_answers,
            policies_comb,
            policies_matches,
            policy_costs,
            equal_memory,
            chat_times,
        )
    },
    **{f"policies-{measure}": functools.partial(policies_means, measure=measure) for measure in MEANS},
    **{f"kernels-{family}": functools.partial(kernels, family=family) for family in FAMILIES},
    "kernels-rows": window_rows,
}


def rendered(page: Path) -> str:
    """The page's text with tables made from the data. Raises ValueError if a table cannot be made."""

    def replaced(mark: re.Match) -> str:
        opening, kind, names, end = mark.groups()
        sources = [page.parent / name for name in names.split()]
        if kind not in KINDS:
            raise ValueError(f"{page}: no kind {kind!r}: there are {', '.join(KINDS)}")
        if missing := [str(source) for source in sources if not source.exists()]:
            raise ValueError(f"{page}: no {', '.join(missing)}")
        try:
            return f"{opening}{KINDS[kind](sources)}{end}"
        except (ValueError, KeyError) as error:
            raise ValueError(f"{page}: {kind} of {names}: {error!r}") from error

    return MARK.sub(replaced, page.read_text(encoding="utf-8"))


def main() -> None:
    for page in sorted(PAGES.rglob("*.md")):
        try:
            page.write_text(rendered(page), encoding="utf-8")
        except ValueError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

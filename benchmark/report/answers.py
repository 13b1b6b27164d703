"""Tables of evaluate.py."""

from pathlib import Path

from benchmark.report.cells import lines, table


def answers(sources: list[Path]) -> str:
    """Exact match by condition and group of questions, with 95% intervals, and answers unlike the reference's."""
    rows = [row for source in sources for row in lines(source) if "condition" in row]
    groups = list(dict.fromkeys(row["group"] for row in rows))
    body = []
    for condition in dict.fromkeys(row["condition"] for row in rows):
        of = {row["group"]: row for row in rows if row["condition"] == condition}
        cells = []
        for group in groups:
            low, high = of[group]["exact_match_interval"]
            cells.append(f"{of[group]['exact_match']:.1%} ({low:.1%} to {high:.1%})")
        differ = ""
        if all("same_as_reference" in row for row in of.values()):
            count = sum(round((1 - row["same_as_reference"]) * row["n"]) for row in of.values())
            differ = f"{count} of {sum(row['n'] for row in of.values()):,}"
        body.append([f"`{condition}`", *cells, differ])
    return table(["condition", *groups, "differ from the reference"], body)

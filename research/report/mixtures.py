"""The table of `python -m research.policies.mixtures`."""

import collections
from collections.abc import Sequence
from pathlib import Path

from benchmark.report.cells import lines, table

NOT_LEARNED = "table"
"""The kind of question that the twin has not learned: not counted in sums."""
NAMES = {
    "block": "nothing: `block`",
    "lead": "BOS and instruction: `base:preamble=lead`",
    "neutral": "BOS and as much neutral text",
    "lead, keys alone": "the lead, but all keys alone",
    "lead, values alone": "the lead, but all values alone",
    "lead, first keys alone": "the lead, but each chunk's first key alone",
    **{f"keys of layer {layer}": f"15%, by the keys of layer {layer}" for layer in range(3, 9)},
    "random tokens, 1": "15% at random",
    "random tokens, 2": "15% at random, drawn again",
    "whole documents": "15%, the documents that deviate most",
    "titles": "first lines",
    "blend without titles": "15% by layer 2, none in first lines",
    "titles, keys in context": "keys of first lines",
    "titles, values in context": "values of first lines",
    "titles, layer 2 in context": "keys and values of first lines in layer 2",
    "titles, layers from 3 in context": "keys and values of first lines from layer 3 on",
    "titles behind the lead": "first lines, behind the lead instead of in context",
}
"""What chunks are computed behind, or which of their KV is recomputed or replaced, as pages name it."""


def mixtures(sources: list[Path]) -> str:
    """Right answers of each mixture, overall and by kind of question, and where the documents of wrong answers are."""
    return mixtures_of([line for source in sources for line in lines(source)])


def mixtures_of(found: Sequence[dict]) -> str:
    """The same for the lines of a study."""
    groups = collections.Counter(line["group"] for line in found if line["policy"] == "block")
    counted = [group for group in groups if group != NOT_LEARNED]
    every = "all" if len(counted) == len(groups) else f"all but {NOT_LEARNED}"
    heads = [f"{every}, {sum(groups[group] for group in counted)}", *(f"{each}, {n}" for each, n in groups.items())]
    body = []
    for name in dict.fromkeys(line["policy"] for line in found):
        mine = [line for line in found if line["policy"] == name]
        right = collections.Counter(line["group"] for line in mine if line["em"])
        places = [(line["right"], line["document"]) for line in mine if not line["em"] and line["group"] in counted]
        away = collections.Counter("in none" if None in both else f"{both[1] - both[0]:+}" for both in places)
        wrong = ", ".join(f"{distance}: {count}" for distance, count in away.most_common())
        sums = [sum(right[group] for group in counted), *(right[group] for group in groups)]
        body.append([NAMES.get(name, f"`{name}`" if ":" in name else name), *map(str, sums), wrong])
    return table(["chunks", *heads, "wrong"], body)

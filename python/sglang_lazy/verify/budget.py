"""How much a policy may recompute within a budget: a line through the times measured at several of its parameters."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

_PARAMETER = re.compile(r"(?P<family>.+[:,])(?P<name>ratio|tokens)=(?P<value>[\d.]+)")


def within_budget(ttft_ms: Mapping[str, float], budget_ms: float) -> dict[str, float]:
    """For each policy measured with at least two values of `ratio` or `tokens`: the one with the largest value that is
    expected to stay within the budget, and the time expected, in milliseconds.

    ttft_ms: measured time to the first token by link. It grows with the number of tokens computed, nearly in
        proportion, so values between those measured are read off a line through them; none is extrapolated.
    """
    families: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for link, time in ttft_ms.items():
        if match := _PARAMETER.fullmatch(link):
            families[match["family"], match["name"]].append((float(match["value"]), time))
    chosen = {}
    for (family, name), points in families.items():
        values, times = np.array(points).T
        if len(set(values)) < 2:
            continue
        slope, start = np.polyfit(values, times, 1)
        largest = values.max()
        if start + slope * largest > budget_ms:
            largest = (budget_ms - start) / slope if slope > 0 else -1.0
        steps = 1 if name == "tokens" else 1000  # in which a parameter is given
        value = math.floor(largest * steps + 1e-6) / steps
        if value >= values.min():
            chosen[f"{family}{name}={value:g}"] = float(start + slope * value)
    return chosen

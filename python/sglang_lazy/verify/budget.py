"""The cost model: the most that a policy may recompute within a time budget, by a line fitted to measured times."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

_PARAMETER = re.compile(r"(?P<family>.+[:,])(?P<name>ratio|tokens)=(?P<value>[\d.]+)")


def within_budget(ttft_ms: Mapping[str, float], budget_ms: float) -> dict[str, float]:
    """For each policy measured with several values of `ratio` or `tokens`, the link with the largest value expected to
    stay within the budget, and the expected time in milliseconds.

    ttft_ms: measured time to the first token, by link. It grows almost linearly with the number of computed tokens, so
        it is interpolated by a fitted line; nothing is extrapolated.
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
        # Rounded down, and written as the server does.
        value = math.floor(largest + 1e-6) if name == "tokens" else math.floor(largest * 1000 + 1e-3) / 1000
        if value >= values.min():
            chosen[f"{family}{name}={value}"] = float(start + slope * value)
    return chosen

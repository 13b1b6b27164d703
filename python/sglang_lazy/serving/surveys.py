"""Surveys of the cached chunks for the page `/lazy`, shared by all viewers, and limited to a share of the scheduler."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from sglang_lazy.chunks.reports import SORTED_BY, TOP
from sglang_lazy.core.periods import merged as merged_rows
from sglang_lazy.serving.scans import AskForNext, Scanned, scan

MIN_AGE, PAUSE_PER_CHUNK = 1.0, 1e-4
"""Seconds for which a survey is reused, at least, and seconds per chunk until the next one may begin: a chunk takes the
scheduler less than a microsecond, so surveys take less than a hundredth of its time."""
_KEPT = 16


class Surveys:
    """The last survey of each tenant."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._kept: OrderedDict[Hashable, tuple[float, dict[str, Any]]] = OrderedDict()
        self._next_start = 0.0  # the earliest time of the next survey

    async def get(self, whose: Hashable, ask: AskForNext) -> dict[str, Any]:
        """A survey, as recent as these limits allow.  whose: what it covers.  ask: asks the scheduler."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            until, survey = self._kept.get(whose, (0.0, {}))
            if clock() < until:
                return survey
            await asyncio.sleep(self._next_start - clock())
            survey = merged(await scan(ask))
            num_chunks = sum(survey["chunks"][tier]["chunks"] for tier in ("resident", "host"))
            self._next_start = clock() + num_chunks * PAUSE_PER_CHUNK
            self._kept[whose] = max(self._next_start, clock() + MIN_AGE), survey
            self._kept.move_to_end(whose)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return survey


def merged(scanned: Scanned) -> dict[str, Any]:
    """Merge all answers into one survey."""
    lists = {
        name: sorted(
            ({**chunk, "dp_rank": rank} for rank, answer in scanned for chunk in answer[name]),
            key=lambda chunk: -chunk[field],
        )[:TOP]
        for name, field in SORTED_BY.items()
    }
    sums = {
        name: _sum([answer[name] for _, answer in scanned if name in answer])
        for name in ("chunks", "memory", "evicted")
    }
    return {**sums, **lists}


def _sum(values: list[Any]) -> Any:
    """The sum of numbers, of objects field by field, or of rows by period; None if the values are None."""
    if isinstance(values[0], dict):
        return {name: _sum([value[name] for value in values if name in value]) for name in values[0]}
    if isinstance(values[0], list):
        return merged_rows(values)
    return None if values[0] is None else sum(values)

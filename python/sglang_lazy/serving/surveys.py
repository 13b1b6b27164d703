"""Surveys of the cached chunks for those who look at the page: one for all, and only now and then."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

from sglang_lazy.chunks.survey import SORTED_BY, TOP
from sglang_lazy.serving.pieces import AskPiece, Pieces, all_pieces

MIN_AGE, PAUSE_PER_CHUNK = 1.0, 1e-4
"""Seconds for which a survey is good enough, and until the next one may begin: a chunk takes the scheduler less than a
microsecond, so surveys take less than a hundredth of its time."""
_KEPT = 16
_ATTR = "_sglang_lazy_surveys"


class Surveys:
    """The last survey of each tenant."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._kept: OrderedDict[Hashable, tuple[float, dict[str, Any]]] = OrderedDict()
        self._free = 0.0  # when the scheduler has had its rest from the last one

    async def get(self, whose: Hashable, ask: AskPiece) -> dict[str, Any]:
        """A survey that is no older than it has to be."""
        clock = asyncio.get_running_loop().time
        async with self._lock:
            until, survey = self._kept.get(whose, (0.0, {}))
            if clock() < until:
                return survey
            await asyncio.sleep(self._free - clock())
            survey = merged(await all_pieces(ask))
            num_chunks = sum(survey["chunks"][tier]["chunks"] for tier in ("resident", "host"))
            self._free = clock() + num_chunks * PAUSE_PER_CHUNK
            self._kept[whose] = max(self._free, clock() + MIN_AGE), survey
            self._kept.move_to_end(whose)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return survey


def merged(pieces: Pieces) -> dict[str, Any]:
    """One survey of all pieces."""
    lists = {
        name: sorted(
            ({**chunk, "dp_rank": rank} for rank, piece in pieces for chunk in piece[name]),
            key=lambda chunk: -chunk[field],
        )[:TOP]
        for name, field in SORTED_BY.items()
    }
    sums = {name: _sum([piece[name] for _, piece in pieces if name in piece]) for name in ("chunks", "memory")}
    return {**sums, **lists}


def _sum(values: list[Any]) -> Any:
    """Of numbers, or of objects of numbers, name by name, where they have it; None where there are none."""
    if isinstance(values[0], dict):
        return {name: _sum([value[name] for value in values if name in value]) for name in values[0]}
    return None if values[0] is None else sum(values)


def surveys_of(tokenizer_manager: Any) -> Surveys:
    """Those of `tokenizer_manager`."""
    return vars(tokenizer_manager).setdefault(_ATTR, Surveys())

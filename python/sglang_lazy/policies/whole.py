"""The chunks that the question attends to most are computed in context, as a whole.

As under `query`, a probe sums the question's attention, which is compared by chunk here. Recurrent layers keep what a
whole chunk does to their states, so that part of one cannot be recomputed there; all of it is ordinary text.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from sglang_lazy.core.policy import Measure, ServerTraits, parameter
from sglang_lazy.core.prompt import ChunkSlice, Ranges
from sglang_lazy.policies.selective import Selective


@dataclasses.dataclass(frozen=True)
class Whole(Selective):
    """ratio: as in `Selective`. A chunk that is longer than what is left of it stays as it is."""

    name: ClassVar[str] = "whole"
    whole_chunks: ClassVar[bool] = True
    ratio: float = parameter(0.3, 0, 1, above=True)

    @property
    def probes(self) -> tuple[Measure, ...]:
        return ("attention",)

    def choose(self, chunks: Sequence[ChunkSlice], scores: Mapping[Measure, np.ndarray]) -> Sequence[Ranges]:
        lens = [chunk.num_kept for chunk in chunks]
        ends = np.cumsum(lens)
        attention = [part.sum() for part in np.split(scores["attention"], ends[:-1])]
        kept: list[Ranges] = [chunk.kept for chunk in chunks]
        room = self.max_recomputed(lens)
        for i in sorted(range(len(chunks)), key=lambda i: -attention[i]):
            if lens[i] <= room:
                kept[i] = ()
                room -= lens[i]
        return kept

    def unfit(self, server: ServerTraits) -> str | None:
        return None if server.whole_layers else "link whole: no layer of this model attends to the whole prompt"

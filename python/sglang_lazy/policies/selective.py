"""Base class of policies that recompute the share of chunk tokens with the highest scores."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from sglang_lazy.core.prompt import ChunkSlice, Ranges
from sglang_lazy.policies.block import Block


@dataclasses.dataclass(frozen=True)
class Selective(Block):
    """ratio: share of the prompt's chunk tokens that is recomputed, above 0 and at most 1."""

    ratio: float = 0.15

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1, got {self.ratio}")

    def max_recomputed(self, chunk_lens: Sequence[int]) -> int:
        return math.ceil(self.ratio * sum(chunk_lens))

    def choose(self, chunks: Sequence[ChunkSlice], scores: np.ndarray) -> Sequence[Ranges]:
        """Leave out the tokens with the highest scores of all chunks together; of equal scores the first."""
        count = self.max_recomputed([len(scores)])
        least = np.partition(scores, -count)[-count]
        keep = scores < least
        keep[np.flatnonzero(scores == least)[count - np.count_nonzero(scores > least) :]] = True
        ends = np.cumsum([chunk.num_kept for chunk in chunks])
        return [_ranges(part) for part in np.split(keep, ends[:-1])]


def _ranges(keep: np.ndarray) -> Ranges:
    """The ranges of the true values of `keep`, bool [n]."""
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False)).reshape(-1, 2)
    return [(start, end) for start, end in edges.tolist()]

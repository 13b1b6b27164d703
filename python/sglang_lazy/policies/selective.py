"""Base class of policies that recompute the share of chunk tokens with the highest scores."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from sglang_lazy.core.policy import parameter
from sglang_lazy.core.prompt import ChunkSlice, Ranges
from sglang_lazy.policies.block import Block


@dataclasses.dataclass(frozen=True)
class Selective(Block):
    """ratio: share of the prompt's chunk tokens that is recomputed at most, above 0 and at most 1."""

    ratio: float = parameter(0.15, 0, 1, above=True)

    def max_recomputed(self, chunk_lens: Sequence[int]) -> int:
        return math.ceil(self.ratio * sum(chunk_lens))

    def without_best(self, chunks: Sequence[ChunkSlice], scores: np.ndarray) -> list[Ranges]:
        """What is kept without the tokens with the highest scores of all chunks together; of equal scores the first."""
        return kept_ranges(chunks, best(scores, self.max_recomputed([len(scores)])))


def best(scores: np.ndarray, count: int) -> np.ndarray:
    """Whether each score is among the `count` highest, bool [n]; of equal scores the first are. 0 < count <= n."""
    least = np.partition(scores, -count)[-count]
    found = scores > least
    found[np.flatnonzero(scores == least)[: count - np.count_nonzero(found)]] = True
    return found


def best_of_each(chunks: Sequence[ChunkSlice], scores: np.ndarray, ratio: float) -> np.ndarray:
    """The same for each chunk by itself, with ceil(ratio * n) of its n tokens."""
    parts = _by_chunk(chunks, scores)
    return np.concatenate([best(part, math.ceil(ratio * len(part))) for part in parts])


def kept_ranges(chunks: Sequence[ChunkSlice], recomputed: np.ndarray) -> list[Ranges]:
    """For each chunk, the ranges of its tokens that are not recomputed.  recomputed: bool [n]."""
    return [_ranges(part) for part in _by_chunk(chunks, ~recomputed)]


def _by_chunk(chunks: Sequence[ChunkSlice], values: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum([chunk.num_kept for chunk in chunks])[:-1])


def _ranges(keep: np.ndarray) -> Ranges:
    """The ranges of the true values of `keep`, bool [n]."""
    edges = np.flatnonzero(np.diff(keep, prepend=False, append=False)).reshape(-1, 2)
    return [(start, end) for start, end in edges.tolist()]

"""The tokens with the smallest keys of each chunk are computed in context, the same ones in every prompt.

Tokens with small keys get most of the attention (Devoto et al., arXiv 2406.11430, section 3). The norms are measured
once, when a chunk is first used under this policy, so later prompts need no extra pass.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from sglang_lazy.core.policy import Measure
from sglang_lazy.core.prompt import ChunkSlice, Ranges
from sglang_lazy.policies.selective import Selective, best_of_each, kept_ranges


@dataclasses.dataclass(frozen=True)
class Static(Selective):
    """ratio: of each chunk."""

    name: ClassVar[str] = "static"

    @property
    def probes(self) -> tuple[Measure, ...]:
        return ("key size",)

    def max_recomputed(self, chunk_lens: Sequence[int]) -> int:
        return sum(math.ceil(self.ratio * length) for length in chunk_lens)

    def choose(self, chunks: Sequence[ChunkSlice], scores: Mapping[Measure, np.ndarray]) -> Sequence[Ranges]:
        return kept_ranges(chunks, best_of_each(chunks, -scores["key size"], self.ratio))

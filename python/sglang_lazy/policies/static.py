"""The tokens with the smallest keys of each chunk are computed in context, the same ones in every prompt.

Tokens with small keys get most of the attention (Devoto et al., arXiv 2406.11430, section 3). The norms are measured
once, when a chunk is first used under this policy, so later prompts need no extra pass.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from sglang_lazy.core.prompt import ChunkSlice, Ranges
from sglang_lazy.policies.selective import Selective


@dataclasses.dataclass(frozen=True)
class Static(Selective):
    """ratio: of each chunk."""

    name: ClassVar[str] = "static"
    probes: ClassVar[Literal["key size"]] = "key size"

    def max_recomputed(self, chunk_lens: Sequence[int]) -> int:
        return sum(math.ceil(self.ratio * length) for length in chunk_lens)

    def choose(self, chunks: Sequence[ChunkSlice], scores: np.ndarray) -> Sequence[Ranges]:
        parts = np.split(scores, np.cumsum([chunk.num_kept for chunk in chunks])[:-1])
        return [
            ranges
            for chunk, part in zip(chunks, parts, strict=True)
            for ranges in super(Static, self).choose([chunk], -part)
        ]

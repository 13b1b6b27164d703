"""CacheBlend (arXiv 2405.16444, section 4): the tokens whose cached keys deviate most are computed in context.

A probe runs the whole prompt as plain text through the model's first layer and up to the second layer's keys, and
compares these with the cached ones. A second pass recomputes the tokens that deviate most.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from sglang_lazy.core.policy import IN_WINDOW_POOL, Measure, ServerTraits
from sglang_lazy.core.prompt import ChunkSlice, Ranges
from sglang_lazy.policies.selective import Selective, best, kept_ranges


@dataclasses.dataclass(frozen=True)
class Blend(Selective):
    name: ClassVar[str] = "blend"

    @property
    def probes(self) -> tuple[Measure, ...]:
        return ("deviation",)

    def choose(self, chunks: Sequence[ChunkSlice], scores: Mapping[Measure, np.ndarray]) -> Sequence[Ranges]:
        deviation = scores["deviation"]
        most = best(deviation, self.max_recomputed([len(deviation)]))
        return kept_ranges(chunks, most & (deviation > 0))  # recomputing the others would change nothing up to here

    def unfit(self, server: ServerTraits) -> str | None:
        if server.window_pool:
            return f"link blend: a prompt's plain text {IN_WINDOW_POOL}"
        if server.partial_pass:
            return None
        return (
            "link blend: no pass can end at the second layer's keys here (--enable-mixed-chunk, "
            "--speculative-algorithm, or only one layer)"
        )

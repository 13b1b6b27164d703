"""ProphetKV (arXiv 2602.02579, section 4): the tokens that the question attends to most are computed in context.

A probe computes the question over the cached chunks and sums its attention to each of their tokens. A second pass
recomputes the tokens that got most, and the question after them. Part of them can be those with the smallest keys
instead, as under `static`: together they do better than either alone (research/notes/policies.md).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from sglang_lazy.core.policy import Measure, ServerTraits, parameter
from sglang_lazy.core.prompt import ChunkSlice, Ranges
from sglang_lazy.policies.selective import Selective, best_of_each


@dataclasses.dataclass(frozen=True)
class Query(Selective):
    """static: the part of `ratio` that is chosen by key size, in each chunk."""

    name: ClassVar[str] = "query"
    static: float = parameter(0.0, 0, 1)

    def __post_init__(self):
        super().__post_init__()
        if self.static > self.ratio:
            raise ValueError(f"static must be at least 0 and at most ratio, got {self.static}")

    @property
    def probes(self) -> tuple[Measure, ...]:
        return ("attention", "key size") if self.static else ("attention",)

    def choose(self, chunks: Sequence[ChunkSlice], scores: Mapping[Measure, np.ndarray]) -> Sequence[Ranges]:
        attention = scores["attention"]
        if self.static:
            small = best_of_each(chunks, -scores["key size"], self.static)
            attention = np.where(small, np.inf, attention)
        return self.without_best(chunks, attention)

    def unfit(self, server: ServerTraits) -> str | None:
        return None if server.whole_layers else "link query: no layer of this model attends to the whole prompt"

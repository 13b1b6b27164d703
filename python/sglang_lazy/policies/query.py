"""ProphetKV (arXiv 2602.02579, section 4): the tokens that the question attends to most are computed in context.

A probe computes the question over the cached chunks and sums its attention to each of their tokens. A second pass
recomputes the tokens that got most, and the question after them.
"""

import dataclasses
from typing import ClassVar, Literal

from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.policies.selective import Selective


@dataclasses.dataclass(frozen=True)
class Query(Selective):
    name: ClassVar[str] = "query"
    probes: ClassVar[Literal["attention"]] = "attention"

    def unfit(self, server: ServerTraits) -> str | None:
        return None if server.whole_layers else "link query: no layer of this model attends to the whole prompt"

"""KVLink (arXiv 2502.16002, section 3.2): trained link tokens follow every chunk and see everything before them."""

import dataclasses
from typing import ClassVar

from sglang_lazy.core.policy import Around, TrainedTokens, parameter
from sglang_lazy.policies.block import Block


@dataclasses.dataclass(frozen=True)
class KvLink(Block):
    """tokens: how many link tokens follow each chunk. Which ones depends on the chunk's index in the prompt."""

    name: ClassVar[str] = "kvlink"
    trained: ClassVar[bool] = True
    tokens: int = parameter(5, 1, 64)

    def around(self, trained: TrainedTokens, index: int) -> Around:
        if not trained.link:
            return Around()
        first = index * self.tokens
        return Around(link=[trained.link[(first + i) % len(trained.link)] for i in range(self.tokens)])

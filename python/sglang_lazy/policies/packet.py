"""KV Packet (arXiv 2604.13226): trained tokens begin and end every chunk, so that its KV fits into any context."""

import dataclasses
from typing import ClassVar

from sglang_lazy.core.policy import Around, TrainedTokens
from sglang_lazy.policies.block import Block


@dataclasses.dataclass(frozen=True)
class Packet(Block):
    name: ClassVar[str] = "packet"
    trained: ClassVar[bool] = True

    def around(self, trained: TrainedTokens, index: int) -> Around:
        return Around(trained.before, trained.behind)

"""EPIC (LegoLink, arXiv 2410.15332, section 4): the first tokens of each chunk are computed in context.

Computed alone, a chunk's first tokens attract attention as those of a whole prompt would.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from sglang_lazy.core.policy import Policy, parameter
from sglang_lazy.core.prompt import Ranges
from sglang_lazy.core.segments import PromptLayout


@dataclasses.dataclass(frozen=True)
class Epic(Policy):
    """tokens: how many of each chunk are computed in context; none of a chunk at the very start of the prompt."""

    name: ClassVar[str] = "epic"
    tokens: int = parameter(16, 1, 1 << 20)

    def kept(self, layout: PromptLayout, input_ids: Sequence[int]) -> Sequence[Ranges]:
        lens = [(start, end - start) for start, end in layout.chunks]
        firsts = [self.tokens if start > 0 else 0 for start, _ in lens]
        return [((first, length),) if first < length else () for first, (_, length) in zip(firsts, lens, strict=True)]

"""Block attention (Block-Attention, arXiv 2409.15355): every chunk is kept whole and sees only itself."""

from collections.abc import Sequence

from sglang_lazy.core.policy import Policy
from sglang_lazy.core.prompt import Ranges
from sglang_lazy.core.segments import PromptLayout


class Block(Policy):
    name = "block"

    def kept(self, layout: PromptLayout, input_ids: Sequence[int]) -> Sequence[Ranges]:
        return [((0, end - start),) for start, end in layout.chunks]

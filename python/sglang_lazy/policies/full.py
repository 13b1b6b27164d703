"""Full attention: the prompt as one ordinary text, answered as SGLang alone would."""

from collections.abc import Sequence

from sglang_lazy.core.policy import Policy
from sglang_lazy.core.prompt import Ranges
from sglang_lazy.core.segments import PromptLayout


class Full(Policy):
    name = "full"
    reuses = False

    def kept(self, layout: PromptLayout, input_ids: Sequence[int]) -> Sequence[Ranges]:
        return [()] * len(layout.chunks)

"""A policy from outside: one class in its own module, registered by a plugin of SGLang's."""

from sglang_lazy.policies import POLICIES, register
from sglang_lazy.policies.block import Block


class EverySecond(Block):
    """Keeps every second chunk; the others are computed in context."""

    name = "every-second"

    def kept(self, layout, input_ids):
        return [() if index % 2 else ranges for index, ranges in enumerate(super().kept(layout, input_ids))]


def load() -> None:
    """SGLang calls this in each of its processes."""
    if EverySecond.name not in POLICIES:
        register(EverySecond)

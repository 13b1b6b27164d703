"""The plan of a prompt with chunks, as it travels with a request through the process that takes requests."""

import dataclasses
from collections.abc import Sequence

from sglang_lazy.core.labels import Label
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.policies import get_policy


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a prompt uses its chunks.

    layout: where they are.  policy: the one that the layout's link names.
    labels: of each chunk, None for those without; empty if none has any.
    """

    layout: PromptLayout
    policy: Policy
    labels: tuple[Label | None, ...] = ()

    @classmethod
    def of(
        cls, chunks: tuple[tuple[int, int], ...], policy: Policy, cache_salt: str | None = None, *, ahead: bool = False
    ) -> "Plan":
        """The plan with these fields of its layout."""
        return cls(PromptLayout(chunks, cache_salt, str(policy), ahead), policy)

    @classmethod
    def salted(cls, cache_salt: str) -> "Plan":
        """The plan of a prompt without chunks, which only carries its salt."""
        return cls.of((), get_policy("full"), cache_salt)

    def labelled(self, labels: Sequence[Label | None]) -> "Plan":
        """The same plan with these labels of its chunks."""
        return dataclasses.replace(self, labels=tuple(labels)) if any(labels) else self

    def moved(self, chunks: tuple[tuple[int, int], ...]) -> "Plan":
        """The same plan with its chunks at other places."""
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, chunks=chunks))

    def pack(self) -> "PackedPlan":
        """The plan in the form of its packed layout, the only part that schedulers get."""
        packed = PackedPlan(self.layout.pack())
        packed.plan = self
        return packed


class PackedPlan(str):
    """A packed layout and the plan that it comes from, so that nobody in this process parses it again. Clients, who
    could claim another tenant's salt in one, cannot send an object of this class."""

    plan: Plan

"""The plan of a prompt with chunks, as it travels with a request through the process that takes requests."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from sglang_lazy.core.keys import digests
from sglang_lazy.core.labels import Label
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.segments import LAYOUT_PARAM, ChunkLimit, PromptLayout
from sglang_lazy.policies import get_policy

_REFUSED = {
    "input_embeds": "input embeddings",
    "positional_embed_overrides": "input embeddings",
    "mm_hashes": "hashes of images",
    "video_data": "videos",
    "audio_data": "audio",
    "session_params": "sessions",
    "multi_item_delimiter_indices": "multi-item scoring",
}
"""Request fields that cannot be combined with reused chunks."""


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

    def chunk_names(self, input_ids: Sequence[int], *namespace: Hashable) -> list[Hashable]:
        """Keys that identify each chunk's KV, as far as this process knows.  namespace: what else its KV depends on."""
        chunks, kind = self.layout.chunks, self.policy.preamble
        lead = input_ids[: chunks[0][0]] if kind == "lead" else ()
        conditions = hash((*namespace, kind, *lead))
        return [(digest, conditions) for digest in digests(input_ids, chunks)]

    def pack(self) -> "PackedPlan":
        """The plan in the form of its packed layout, the only part that schedulers get."""
        packed = PackedPlan(self.layout.pack())
        packed.plan = self
        return packed


class PackedPlan(str):
    """A packed layout and the plan that it comes from, so that nobody in this process parses it again. Clients, who
    could claim another tenant's salt in one, cannot send an object of this class."""

    plan: Plan


def packed_in(params: Any) -> PackedPlan | None:
    """The plan in the sampling parameters of one request, None without one.

    Raises ValueError for one that no surface of this process has made.
    """
    custom_params = params.get("custom_params") if isinstance(params, Mapping) else None
    if not isinstance(custom_params, Mapping) or LAYOUT_PARAM not in custom_params:
        return None
    packed = custom_params[LAYOUT_PARAM]
    if not isinstance(packed, PackedPlan):
        raise ValueError(f"custom_params.{LAYOUT_PARAM} is set by the server: give a prompt as segments instead")
    return packed


def check_combined(given: Mapping[str, Any], layout: PromptLayout, limit: ChunkLimit) -> None:
    """Raise ValueError if chunks cannot be reused together with the rest of a request.  given: its fields."""
    limit.check(len(layout.chunks))
    for field, what in _REFUSED.items():
        if given.get(field):
            raise ValueError(f"a prompt with chunks cannot be combined with {what} ({field})")
    if (given["sampling_params"].get("beam_width") or 1) > 1:
        raise ValueError("a prompt with chunks cannot be combined with beam search (beam_width)")
    chunks_end, start = layout.chunks[-1][1], given.get("logprob_start_len")
    if given.get("return_logprob") and start is not None and 0 <= start < chunks_end:
        raise ValueError(
            f"prompt logprobs from position {start} need tokens that are reused from chunks: the last chunk ends at "
            f"position {chunks_end}, so logprob_start_len must be at least {chunks_end}, or -1 for none"
        )

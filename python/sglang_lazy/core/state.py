"""What requests carry through the scheduler: one with chunks as `req.link`, one that computes chunks as `req.fill`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_lazy.core.prompt import ChunkRef, FillRow, LinkedPrompt, Row
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout, check_num_chunks
from sglang_lazy.port.radix import ChunkCopy, ChunkNodes


@dataclasses.dataclass(eq=False)
class Link:
    """State of one linked request.

    found: per chunk, the tree node at which it was resident on arrival, or None. Not locked: it may be evicted since.
    materialize: whether the request gets a copy of its chunks, turned to their positions, instead of attending to the
        shared ones in place.
    chunks: where its chunks are, locked for it while it waits; None while it holds nothing.
    row: the row's order, once the request has been matched for a batch.
    copy: the copy of its chunks while the request has a row, if it gets one.
    reused: per chunk, whether it was resident on arrival and has not been computed for this request since.
    """

    prompt: LinkedPrompt
    found: list[TreeNode | None]
    materialize: bool = False
    chunks: ChunkNodes | None = None
    row: Row | None = None
    copy: ChunkCopy | None = None
    reused: list[bool] = dataclasses.field(init=False)

    def __post_init__(self):
        self.reused = [node is not None for node in self.found]

    @property
    def admitted(self) -> bool:
        """Whether its chunks are locked or being computed."""
        return self.chunks is not None

    @property
    def ready(self) -> bool:
        """Whether all its chunks are resident and locked."""
        return self.chunks is not None and self.chunks.complete

    @property
    def segments(self) -> tuple[ChunkRef, ...]:
        """The chunks whose keys stand in the row as if each began at position 0."""
        return () if self.materialize else self.prompt.chunks

    @property
    def num_reused_tokens(self) -> int:
        """Chunk tokens that were not computed for this request."""
        return sum(chunk.used for chunk, reused in zip(self.prompt.chunks, self.reused, strict=True) if reused)

    @property
    def num_fresh_tokens(self) -> int:
        """Chunk tokens in its row that were computed for this request."""
        return self.prompt.num_chunk_tokens - self.num_reused_tokens

    @property
    def hit_mask(self) -> int:
        """Bit i is set if chunk i was reused."""
        return sum(1 << i for i, reused in enumerate(self.reused) if reused)


@dataclasses.dataclass(eq=False)
class Fill:
    """State of an internal request that computes missing chunks, one behind the other; none sees another.

    It ends when the batch with its last tokens is formed.

    owner: the request it was made for.
    parents: the requests that wait for it.
    row: the row's order, once it has been matched for a batch.
    duplicates: int64, slots that it has written, or will, for tokens that the tree has in others; None until its chunks
        are published.
    """

    chunks: Sequence[ChunkRef]
    owner: Req
    parents: list[Req] = dataclasses.field(default_factory=list)
    row: FillRow | None = None
    duplicates: torch.Tensor | None = None


def requested_layout(req: Any) -> PromptLayout | None:
    """The layout that came with `req`, or None where no chunk is to be reused. Raises ValueError if it is malformed."""
    params = req.sampling_params.custom_params
    if not isinstance(params, dict) or LAYOUT_PARAM not in params:
        return None
    layout = PromptLayout.unpack(params[LAYOUT_PARAM], len(req.origin_input_ids))
    return layout if layout.link == "block" else None


def check_request(req: Any, layout: PromptLayout, max_chunks: int) -> None:
    """Raise ValueError where chunks cannot be served together with what else `req` asks for."""
    check_num_chunks(len(layout.chunks), max_chunks)
    refused = {
        "a LoRA adapter": req.lora_id is not None,
        "a session": req.session is not None,
        "input embeddings": req.input_embeds is not None or req.positional_embed_overrides is not None,
        "multimodal inputs": req.multimodal_inputs is not None,
        "returned hidden states": bool(req.return_hidden_states),
        "returned routed experts": req.return_routed_experts,
    }
    for what, asked in refused.items():
        if asked:
            raise ValueError(f"chunks cannot be combined with {what}")
    last_chunk_end = layout.chunks[-1][1]
    if req.return_logprob and 0 <= req.logprob_start_len < min(last_chunk_end, len(req.origin_input_ids)):
        raise ValueError(
            f"prompt logprobs from position {req.logprob_start_len} would need tokens inside or before a reused chunk; "
            f"ask from position {last_chunk_end} on"
        )

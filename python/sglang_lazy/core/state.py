"""What requests carry through SGLang's scheduler, all of it in one attribute: `req.lazy`.

A linked request has a `LinkedRequest`, an internal one that computes chunks has a `Fill`, all others have nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_lazy.core.policy import Policy
from sglang_lazy.core.prompt import ChunkSlice, LinkedPrompt
from sglang_lazy.core.rows import FillRow, Row


@dataclasses.dataclass(eq=False)
class ChunkNodes:
    """Where a linked request's chunks are in the tree. Locked once, however many hold them: the waiting request, its
    row, or both.

    nodes: per slice, the tree node at which its needed part ends; None while that is missing.
    num_locks: the number of holders.
    """

    nodes: list[Any]
    num_locks: int = 0

    @property
    def complete(self) -> bool:
        return None not in self.nodes


@dataclasses.dataclass(eq=False)
class RowNodes:
    """All tree nodes that a row depends on. SGLang locks and unlocks it as the request's `last_node`.

    spans: per text span, the node where its cached part ends; for a fill, the same per chunk.
    num_locks: SGLang's locks. The nodes are locked once while there is any.
    used: whether the use of these nodes has been counted.
    """

    chunks: ChunkNodes
    spans: list[Any]
    num_locks: int = 0
    used: bool = False


@dataclasses.dataclass(eq=False)
class LinkedRequest:
    """A request whose policy keeps KV of chunks.

    found: per slice, the tree node at which it was resident on arrival, or None. Not locked, so it may be evicted.
    chunks: where its chunks are, locked while it waits; None while it holds nothing.
    row: the row's order; set when the request is matched for a batch.
    own: what its policy keeps while the request has a row.
    reused: per slice, whether it was resident on arrival and has not been computed for this request since.
    """

    prompt: LinkedPrompt
    policy: Policy
    found: list[Any]
    chunks: ChunkNodes | None = None
    row: Row = dataclasses.field(init=False)
    own: Any = None
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
    def segments(self) -> tuple[ChunkSlice, ...]:
        """The slices whose keys are stored in the row at positions relative to their chunks."""
        return self.prompt.chunks if self.policy.in_place else ()

    @property
    def num_reused_tokens(self) -> int:
        """Chunk tokens that were not computed for this request."""
        return sum(chunk.num_kept for chunk, reused in zip(self.prompt.chunks, self.reused, strict=True) if reused)

    @property
    def num_computed_tokens(self) -> int:
        """Kept chunk tokens that were computed for this request."""
        return self.prompt.num_chunk_tokens - self.num_reused_tokens

    @property
    def hit_mask(self) -> int:
        """Bit i is set if chunk i of the prompt's layout was reused."""
        return sum(1 << chunk.index for chunk, reused in zip(self.prompt.chunks, self.reused, strict=True) if reused)


@dataclasses.dataclass(eq=False)
class Fill:
    """An internal request that computes missing chunks one after another; none sees another.

    It ends when the batch with its last tokens is formed.

    owner: the request for which it was made.
    parents: the requests that wait for it.
    row: the row's order; set when it is matched for a batch.
    duplicates: int64, its own slots for tokens that the tree holds in other slots; None until its chunks are published.
    """

    chunks: Sequence[ChunkSlice]
    owner: Any
    parents: list[Any] = dataclasses.field(default_factory=list)
    row: FillRow = dataclasses.field(init=False)
    duplicates: torch.Tensor | None = None


def lazy_state(req: Any) -> LinkedRequest | Fill | None:
    """What `req` carries."""
    return getattr(req, "lazy", None)


def as_linked(req: Any) -> LinkedRequest:
    """The state of a request that is known to be linked."""
    state = lazy_state(req)
    assert isinstance(state, LinkedRequest)
    return state


def linked(req: Any) -> LinkedRequest | None:
    """The state of a linked request, None for any other."""
    state = lazy_state(req)
    return state if isinstance(state, LinkedRequest) else None


def fill_of(req: Any) -> Fill | None:
    """The state of a fill, None for any other request."""
    state = lazy_state(req)
    return state if isinstance(state, Fill) else None

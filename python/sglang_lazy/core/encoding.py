"""A chunk waiting for the encoder."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_lazy.core.prompt import ChunkSlice


@dataclasses.dataclass(eq=False)
class Encoding:
    """A missing chunk, to be encoded with the first batch that has one of its parents.

    owner: the request that it was created for.
    slots: int64 [num_tokens], its own.
    parents: the requests that wait for it.
    """

    chunk: ChunkSlice
    owner: Any
    slots: torch.Tensor
    parents: list[Any] = dataclasses.field(default_factory=list)

    @property
    def chunks(self) -> tuple[ChunkSlice, ...]:
        return (self.chunk,)


def chunks_of(work: Any) -> Sequence[ChunkSlice]:
    """The chunks of what a producer has under way: an `Encoding` or a fill's request."""
    return work.chunks if isinstance(work, Encoding) else work.lazy.chunks

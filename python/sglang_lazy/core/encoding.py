"""A chunk that an encoder is to read."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from sglang_lazy.core.prompt import ChunkSlice


@dataclasses.dataclass(eq=False)
class Encoding:
    """A missing chunk that the encoder is to read, with the first batch that has a request for it.

    owner: the request for which it was asked for.
    slots: int64 [its tokens], which nobody else has.
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
    """What a pending chunk's producer has under way: an `Encoding`, or the request of a fill."""
    return work.chunks if isinstance(work, Encoding) else work.lazy.chunks

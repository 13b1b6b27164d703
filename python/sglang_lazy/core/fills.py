"""What computes missing chunks: a fill, which is an internal request, or an encoder's pass."""

import dataclasses
import functools
from array import array
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.row_order import FillRow


class FillPart(NamedTuple):
    """Tokens (int64) that a fill computes, and the namespace to publish them in.  chunk: None for the preamble."""

    tokens: array
    namespace: Hashable
    chunk: ChunkSlice | None = None


@dataclasses.dataclass(eq=False)
class Fill:
    """An internal request that computes missing chunks, none of which sees another.

    All chunks have the same preamble, which the fill computes as well unless it is cached. The chunks are published
    when the batch with the fill's last tokens is formed.

    owner: the request that it was created for.
    parents: the requests that wait for it.
    row: the row's order; set when it is matched for a batch.
    published: whether its chunks have been published, which sets `duplicates` and `lent`.
    duplicates: int64, its own slots for tokens that the tree holds in other slots.
    lent: int64, those of `duplicates` whose window KV the tree has taken.
    began: `time.perf_counter()` when it was last matched for a batch.
    states: of a model with recurrent layers, the slots in which the states of its parts end, once it has a row.
    own_states: those that no node of the tree owns.
    """

    chunks: Sequence[ChunkSlice]
    owner: Request
    parents: list[Request] = dataclasses.field(default_factory=list)
    row: FillRow = dataclasses.field(init=False)
    published: bool = False
    duplicates: torch.Tensor = dataclasses.field(init=False)
    lent: torch.Tensor = dataclasses.field(init=False)
    began: float = dataclasses.field(init=False)
    states: list[int] = dataclasses.field(default_factory=list)
    own_states: list[int] = dataclasses.field(default_factory=list)

    @property
    def preamble(self) -> array:
        """The tokens after which all its chunks are computed, int64."""
        return self.chunks[0].preamble

    @functools.cached_property
    def parts(self) -> list[FillPart]:
        """What it computes, in order: the preamble, if there is one, and the chunks."""
        preamble = [FillPart(self.preamble, self.chunks[0].key.namespace.leading)] if self.preamble else []
        return [*preamble, *(FillPart(chunk.tokens, chunk.key.namespace, chunk) for chunk in self.chunks)]


@dataclasses.dataclass(eq=False)
class Encoding:
    """A missing chunk, to be encoded with the first batch that has one of its parents.

    owner: the request that it was created for.
    slots: int64 [num_tokens], its own.
    parents: the requests that wait for it.
    """

    chunk: ChunkSlice
    owner: Request
    slots: torch.Tensor
    parents: list[Request] = dataclasses.field(default_factory=list)

    @property
    def chunks(self) -> tuple[ChunkSlice, ...]:
        return (self.chunk,)


def chunks_of(work: Encoding | Request) -> Sequence[ChunkSlice]:
    """The chunks of what a producer has under way: an `Encoding` or a fill's request."""
    if isinstance(work, Encoding):
        return work.chunks
    assert isinstance(work.lazy, Fill)
    return work.lazy.chunks

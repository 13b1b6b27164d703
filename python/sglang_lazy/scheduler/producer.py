"""Producers, which compute the KV of missing chunks."""

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks import fill_rows
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.core.fills import Encoding, Fill, chunks_of
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import fill_of
from sglang_lazy.scheduler.facts import Facts, Taken

NewRequest = Callable[[str, array, Request], Request]
"""Creates a prefill-only request without a client from its id, its tokens, and the request that it serves."""


class Producer(Protocol):
    """Makes missing chunks resident. Those in progress are in `ChunkStore.pending`."""

    def produce(self, parent: Request, chunks: Sequence[ChunkSlice]) -> None:
        """Start producing `chunks`, none of them pending, on behalf of `parent`."""

    def wait(self, parent: Request, keys: Iterable[ChunkKey]) -> list[Request] | None:
        """Register `parent` as waiting for pending chunks.

        Returns the requests to schedule before it, None if it must wait for a later batch.
        """

    def leave(self, parent: Request, keys: Iterable[ChunkKey]) -> None:
        """Unregister `parent`, which no longer waits for these chunks."""

    def started(self, key: ChunkKey) -> bool:
        """Whether memory has been allocated for a pending chunk."""

    def reconcile(self) -> None:
        """Drop what was aborted and what nobody waits for any more."""

    def publish(
        self, taken: Sequence[Taken], slots: torch.Tensor, rows: RowCache
    ) -> Iterator[tuple[Fill | Encoding, dict[ChunkKey, Node]]]:
        """Give the tree the chunks that a prefill batch computes, once its rows are assigned.

        taken: the batch's requests.  slots: those that it writes, int64.

        Yields each completed `Fill` or `Encoding`, and the nodes where its chunks end.
        """

    def forget(self, req: Request) -> None:
        """Drop the chunks of an internal request that was retracted."""

    def before_forward(self) -> None:
        """Launch what must precede the forward pass of the last formed batch."""


class FillProducer:
    """Computes chunks with *fills*: prefill-only SGLang requests, each for as many chunks as one batch can take.

    pending: the store's, from chunk key to fill request.
    max_tokens: the most tokens of a fill with several chunks. A larger one would take several batches, and all of its
        chunks would wait for the last.
    max_pieces: the most parts of a fill, its preamble among them; at least 2.
    """

    def __init__(
        self,
        pending: dict[ChunkKey, Any],
        facts: Facts,
        new_request: NewRequest,
        max_tokens: int,
        max_pieces: float = math.inf,
    ):
        self.pending = pending
        self.facts = facts
        self.new_request = new_request
        self.max_tokens, self.max_pieces = max_tokens, max_pieces
        self._ids = itertools.count()

    def produce(self, parent: Request, chunks: Sequence[ChunkSlice]) -> None:
        for share in shares(chunks, self.max_tokens, self.max_pieces):
            fill, tokens = Fill(share, parent), array("q")
            for part in fill.parts:
                tokens += part.tokens
            # SGLang aborts by id prefix: no client's id begins with a NUL.
            req = self.new_request(f"\0fill-{next(self._ids)}", tokens, parent)
            req.lazy = fill
            self.pending.update(dict.fromkeys((chunk.key for chunk in share), req))

    def wait(self, parent: Request, keys: Iterable[ChunkKey]) -> list[Request]:
        reqs = list(dict.fromkeys(self.pending[key] for key in keys))
        for req in reqs:
            if parent not in req.lazy.parents:
                req.lazy.parents.append(parent)
                self.facts.hurry(req, parent)
        return [req for req in reqs if not self.facts.is_launched(req)]

    def leave(self, parent: Request, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            if key in self.pending and parent in self.pending[key].lazy.parents:
                self.pending[key].lazy.parents.remove(parent)

    def started(self, key: ChunkKey) -> bool:
        return self.facts.is_launched(self.pending[key])

    def reconcile(self) -> None:
        """Drop finished fills, and unstarted ones whose owner has left; other waiting requests get new fills."""
        for req in dict.fromkeys(self.pending.values()):
            if self.facts.is_finished(req) or (
                not self.facts.is_launched(req) and req.lazy.owner not in req.lazy.parents
            ):
                self.forget(req)

    def publish(
        self, taken: Sequence[Taken], slots: torch.Tensor, rows: RowCache
    ) -> Iterator[tuple[Fill, dict[ChunkKey, Node]]]:
        fills = [(one, fill) for one in taken if (fill := fill_of(one.req)) is not None]
        for _, fill in fills:  # before any locks a state that others have counted as evictable, as that of its preamble
            fill_rows.reserve(rows, fill)
        for (req, start, end, whole), fill in fills:
            if whole:
                published = fill_rows.publish(rows, req, fill, slots[start:end])
                self.forget(req)
                yield fill, published

    def before_forward(self) -> None:
        """Do nothing: fills are requests, which the pass itself computes."""

    def forget(self, req: Request) -> None:
        """Drop a fill's chunks from `pending`: they are published, or the fill was aborted or retracted."""
        for chunk in chunks_of(req):
            if self.pending.get(chunk.key) is req:
                del self.pending[chunk.key]


def shares(chunks: Iterable[ChunkSlice], max_tokens: int, max_pieces: float = math.inf) -> Iterator[list[ChunkSlice]]:
    """Split `chunks` into groups of at most `max_tokens` including the preamble, or of one longer chunk; and of at most
    `max_pieces` parts, one of them the preamble."""
    share: list[ChunkSlice] = []
    num_tokens = 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        if share and (len(chunk.preamble) + num_tokens > max_tokens or len(share) + bool(chunk.preamble) >= max_pieces):
            yield share
            share, num_tokens = [], chunk.num_tokens
        share.append(chunk)
    if share:
        yield share

"""Producers: what makes the KV of missing chunks."""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from sglang_lazy.chunks.rows import RowCache
from sglang_lazy.chunks.tree import Node
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import Fill, fill_of

NewRequest = Callable[[str, array, Any], Any]
"""Makes a prefill-only request that answers nobody, from its id, its tokens, and the request it is made for."""


class Producer(Protocol):
    """Makes missing chunks resident. What is under way is in `ChunkStore.pending`."""

    def produce(self, parent: Any, chunks: Sequence[ChunkSlice]) -> None:
        """Put `chunks`, none of them pending, under way on behalf of `parent`."""

    def wait(self, parent: Any, keys: Iterable[ChunkKey]) -> list[Any] | None:
        """Register `parent` as waiting for pending chunks; returns the requests that must be scheduled before it, None
        if it must wait for another batch."""

    def leave(self, parent: Any, keys: Iterable[ChunkKey]) -> None:
        """`parent` does not wait for these any more."""

    def started(self, key: ChunkKey) -> bool:
        """Whether a pending chunk has memory already."""

    def reconcile(self) -> None:
        """Drop what was aborted and what nobody wants any more."""

    def publish(self, batch: Any, rows: RowCache) -> Iterator[tuple[Any, dict[ChunkKey, Node]]]:
        """The rows of a prefill batch are assigned: give the tree the chunks that it computes. Each `Fill` or
        `Encoding` that was under way, and where its chunks end."""

    def forget(self, req: Any) -> None:
        """An internal request `req` was retracted."""

    def before_forward(self) -> None:
        """Launch what must precede the forward pass of the batch formed last."""


class FillProducer:
    """Computes chunks with *fills*: prefill-only requests of SGLang, each for as many chunks as are computed at once.

    pending: the store's, from chunk key to fill request.
    max_tokens: how many tokens a fill of several chunks may have. More would not be computed at once, nor be of use
        before its end.
    priority_sign: 1 where requests with low priorities go first, -1 where those with high ones do.
    """

    def __init__(self, pending: dict[ChunkKey, Any], new_request: NewRequest, max_tokens: int, priority_sign: int = -1):
        self.pending = pending
        self.new_request = new_request
        self.max_tokens = max_tokens
        self.priority_sign = priority_sign
        self._ids = itertools.count()

    def produce(self, parent: Any, chunks: Sequence[ChunkSlice]) -> None:
        for share in shares(chunks, self.max_tokens):
            fill, tokens = Fill(share, parent), array("q")
            for part in fill.parts:
                tokens += part.tokens
            # SGLang aborts by prefixes of ids: no user's id begins like this one.
            req = self.new_request(f"\0fill-{next(self._ids)}", tokens, parent)
            req.lazy = fill
            self.pending.update(dict.fromkeys((chunk.key for chunk in share), req))

    def wait(self, parent: Any, keys: Iterable[ChunkKey]) -> list[Any]:
        fills = list(dict.fromkeys(self.pending[key] for key in keys))
        for fill in fills:
            if parent not in fill.lazy.parents:
                fill.lazy.parents.append(parent)
                if parent.priority is not None:
                    fill.priority = min(fill.priority, parent.priority, key=lambda p: p * self.priority_sign)
        return [fill for fill in fills if not is_launched(fill)]

    def leave(self, parent: Any, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            if key in self.pending and parent in self.pending[key].lazy.parents:
                self.pending[key].lazy.parents.remove(parent)

    def started(self, key: ChunkKey) -> bool:
        return is_launched(self.pending[key])

    def reconcile(self) -> None:
        """A fill that has not started goes with the request it was made for; other waiting requests get new ones."""
        for req in dict.fromkeys(self.pending.values()):
            if req.finished() or (not is_launched(req) and req.lazy.owner not in req.lazy.parents):
                self.forget(req)

    def publish(self, batch: Any, rows: RowCache) -> Iterator[tuple[Fill, dict[ChunkKey, Node]]]:
        ends = itertools.accumulate(batch.extend_lens)
        for req, end, extend_len in zip(batch.reqs, ends, batch.extend_lens, strict=True):
            fill = fill_of(req)
            if fill is not None and req is not batch.chunked_req:
                published = rows.publish_fill(req, fill, batch.out_cache_loc[end - extend_len : end])
                self.forget(req)
                yield fill, published

    def before_forward(self) -> None:
        """Fills are requests: the pass itself computes them."""

    def forget(self, req: Any) -> None:
        """A fill's chunks are published, or it was aborted or retracted."""
        for chunk in req.lazy.chunks:
            if self.pending.get(chunk.key) is req:
                del self.pending[chunk.key]


def max_fill_tokens(scheduler: Any) -> int:
    """How many tokens of chunks are computed at once, but for a longer chunk."""
    return scheduler.chunked_prefill_size or scheduler.max_prefill_tokens


def is_launched(req: Any) -> bool:
    """Whether a batch has taken a fill."""
    return req.req_pool_idx is not None


def shares(chunks: Iterable[ChunkSlice], max_tokens: int) -> Iterator[list[ChunkSlice]]:
    """`chunks` as they are computed at once: at most `max_tokens` with the preamble, or one longer chunk."""
    share: list[ChunkSlice] = []
    num_tokens = 0
    for chunk in chunks:
        num_tokens += chunk.num_tokens
        if share and len(chunk.preamble) + num_tokens > max_tokens:
            yield share
            share, num_tokens = [], chunk.num_tokens
        share.append(chunk)
    if share:
        yield share

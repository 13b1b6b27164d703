"""The producer for models with cross-attention: an encoder computes chunks before the first batch that needs them.

Slots are allocated when a parent is admitted. No SGLang request represents a chunk: the encoder's pass ends before the
decoder's begins, and it writes KV of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.core.fills import Encoding
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import linked
from sglang_lazy.scheduler.facts import Facts, Taken


class EncoderProducer:
    """A `Producer` that encodes chunks.

    pending: the store's.
    max_tokens: the most chunk tokens to encode for one batch, except for a single request that misses more.
    allocate: returns slots of the chunks' pool, int64, evicting as needed; admission has checked that there are enough.
    free: returns slots to the pool.
    encode: launches the encoder.
    """

    def __init__(
        self,
        pending: dict[ChunkKey, Encoding],
        facts: Facts,
        max_tokens: int,
        allocate: Callable[[int], torch.Tensor],
        free: Callable[[torch.Tensor], None],
        encode: Callable[[Sequence[Encoding]], None],
    ):
        self.pending, self.facts, self.max_tokens = pending, facts, max_tokens
        self.allocate, self.free, self.encode = allocate, free, encode
        self._next: dict[ChunkKey, int] = {}  # token counts of the chunks that the next batch's requests miss
        self._published: list[Encoding] = []

    def produce(self, parent: Request, chunks: Sequence[ChunkSlice]) -> None:
        for chunk in chunks:
            self.pending[chunk.key] = Encoding(chunk, parent, self.allocate(chunk.num_tokens))

    def wait(self, parent: Request, keys: Iterable[ChunkKey]) -> list[Request] | None:
        missing = {key: self.pending[key] for key in keys}
        for encoding in missing.values():
            if parent not in encoding.parents:
                encoding.parents.append(parent)
        new = {key: encoding.chunk.num_tokens for key, encoding in missing.items() if key not in self._next}
        if self._next and sum(self._next.values()) + sum(new.values()) > self.max_tokens:
            return None
        self._next |= new
        return []

    def leave(self, parent: Request, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            if key in self.pending and parent in self.pending[key].parents:
                self.pending[key].parents.remove(parent)

    def started(self, key: ChunkKey) -> bool:
        return True

    def reconcile(self) -> None:
        self._next.clear()
        for key, encoding in list(self.pending.items()):
            if not encoding.parents:
                self.free(encoding.slots)
                del self.pending[key]

    def publish(
        self, taken: Sequence[Taken], slots: torch.Tensor, rows: RowCache
    ) -> Iterator[tuple[Encoding, dict[ChunkKey, Node]]]:
        for req in (one.req for one in taken):
            if (state := linked(req)) is None:
                continue
            for chunk in state.prompt.chunks:
                encoding = self.pending.get(chunk.key)
                if encoding is not None and req in encoding.parents:
                    num_present, node, _ = rows.store.insert(chunk, encoding.slots, self.facts.priority(req))
                    assert not num_present, "a whole chunk begins like no other"
                    del self.pending[chunk.key]
                    self._published.append(encoding)
                    rows.store.counts.num_filled_tokens += chunk.num_tokens
                    yield encoding, {chunk.key: node}

    def forget(self, req: Request) -> None:
        """Do nothing: no request is internal to this producer."""

    def before_forward(self) -> None:
        if self._published:
            self.encode(self._published)
            self._published = []

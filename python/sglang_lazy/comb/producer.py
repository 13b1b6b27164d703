"""The producer for models with cross-attention: an encoder computes chunks before the first batch that needs them.

Slots are allocated when a parent is admitted. No SGLang request represents a chunk: the encoder's pass ends before the
decoder's begins, and it writes KV of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.comb.encoder_rows import EncoderRows
from sglang_lazy.core.device import read_here, to_device
from sglang_lazy.core.fills import Encoding
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.model import AttentionLayer
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import linked
from sglang_lazy.scheduler.facts import Facts, Taken
from sglang_lazy.scheduler.producer import FillProducer, NewRequest, Producer, shares


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


class Encoder:
    """Launches the encoder on missing chunks.

    encode: the model's: takes the chunks' tokens, int64, and their rows, and yields K and V of each cross layer.
    write: stores K and V of a cross layer in slots.
    layer: one of the cross layers, without rotation.  causal: whether a chunk's tokens see only those before them.
    max_tokens: of one pass, unless a single chunk is longer.
    """

    def __init__(
        self,
        encode: Callable[[torch.Tensor, EncoderRows], Iterable[tuple[torch.Tensor, torch.Tensor]]],
        write: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None],
        layer: AttentionLayer,
        causal: bool,
        max_tokens: int,
    ):
        self._encode, self._write, self._layer = encode, write, layer
        self._causal, self._max_tokens = causal, max_tokens

    def __call__(self, encodings: Sequence[Encoding]) -> None:
        slots = {encoding.chunk.key: encoding.slots for encoding in encodings}
        for chunks in shares([encoding.chunk for encoding in encodings], self._max_tokens):
            lens = [chunk.num_tokens for chunk in chunks]
            rows = EncoderRows(lens, self._causal, self._layer.kernels, self._layer.rope)
            ids = np.concatenate([np.frombuffer(chunk.tokens, dtype=np.int64) for chunk in chunks])
            places = [slots[chunk.key] for chunk in chunks]
            for place in places:  # its request may end and free it before the pass has run
                read_here(place)
            location = torch.cat(places)
            for layer, (keys, values) in enumerate(self._encode(to_device(ids, rows.positions.device), rows)):
                self._write(layer, location, keys, values)


def new_producer(
    store: ChunkStore,
    facts: Facts,
    new_request: NewRequest,
    max_tokens: int,
    max_pieces: float,
    encode: Callable[[Sequence[Encoding]], None] | None,
) -> Producer:
    """What computes the missing chunks of a server: fills, or an encoder if the model has one.

    max_tokens, max_pieces: of one fill, see `FillProducer`.  encode: launches the encoder; None without one.
    """
    if encode is None:
        return FillProducer(store.pending, facts, new_request, max_tokens, max_pieces)
    device = store.device
    return EncoderProducer(store.pending, facts, max_tokens, device.allocate, device.free, encode)

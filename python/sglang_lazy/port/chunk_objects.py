"""Chunks as objects of one of SGLang's storage backends: what an object holds, and what moves objects.

A chunk of an 8B model has hundreds of megabytes. It is kept in pieces, which several threads move at once.
"""

import collections
import functools
import itertools
import logging
import queue
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch
import xxhash

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""Of keys and values in one object, at most, unless a single token has more."""
NUM_THREADS = 8
"""For each direction."""
_HEADER = struct.Struct("<8s32sII16s")
_MAGIC = b"lazy-kv1"


class ChunkObjects:
    """Moves chunks between a host pool and a backend. `written` and `read` hold what was asked for, in that order.

    An object is a header with the chunk's name, the piece's place and length in tokens and its XXH3, then keys and
    values, [2, layers, tokens, heads, head_dim], in the type of the cache. Whatever is not such an object of that name
    and place counts as missing.
    """

    def __init__(self, backend: Any, pool: Any):
        self.backend, self.pool = backend, pool
        self.written, self.read = InOrder(), InOrder()
        self._tokens = max(1, PIECE_BYTES // pool.get_size_per_token())  # of a piece
        self._layers = [_rows(layer) for layer in (*pool.k_data_refs, *pool.v_data_refs)]
        self._buffers = threading.local()

    def start_write(self, name: bytes, slots: torch.Tensor, what: Any) -> None:
        """Store the KV in these slots of the host, int64; they must not change before it has ended."""
        self.written.ask(what, self._each_piece(self._write, name, slots))

    def start_read(self, name: bytes, slots: torch.Tensor, what: Any) -> None:
        """Fetch KV into these slots of the host, int64."""
        self.read.ask(what, self._each_piece(self._read, name, slots))

    def settle(self) -> None:
        """Wait until all is done that was asked for."""
        self.written.settle()
        self.read.settle()

    def _each_piece(self, act: Callable, name: bytes, slots: torch.Tensor) -> Iterator[Callable[[], bool]]:
        for index, piece in enumerate(slots.split(self._tokens)):
            yield functools.partial(act, name, index, piece.numpy())

    def _write(self, name: bytes, index: int, slots: np.ndarray) -> bool:
        stored, parts = self._new_object(len(slots))
        for layer, part in zip(self._layers, parts, strict=True):
            np.take(layer, slots, axis=0, out=part, mode="clip")  # other modes copy once more
        stored[: _HEADER.size] = np.frombuffer(_header(name, index, len(slots), stored), np.uint8)
        return bool(self.backend.batch_set([_key(name, index)], [torch.from_numpy(stored)]))

    def _read(self, name: bytes, index: int, slots: np.ndarray) -> bool:
        key = _key(name, index)
        if not self.backend.exists(key):
            return False
        stored, parts = self._new_object(len(slots))
        found = self.backend.batch_get([key], [torch.from_numpy(stored)])
        if not found or found[0] is None:
            return False
        if stored[: _HEADER.size].tobytes() != _header(name, index, len(slots), stored):
            logger.warning("sglang-lazy: stored object %s is damaged", key)
            return False
        for layer, part in zip(self._layers, parts, strict=True):
            layer[slots] = part
        return True

    def _new_object(self, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Memory for an object, uint8, and what each layer has of it, [layers, tokens, bytes]. The thread's next object
        has the same."""
        row_bytes = self._layers[0].shape[1]
        if not hasattr(self._buffers, "bytes"):
            self._buffers.bytes = np.empty(_HEADER.size + self._tokens * len(self._layers) * row_bytes, np.uint8)
        stored = self._buffers.bytes[: _HEADER.size + num_tokens * len(self._layers) * row_bytes]
        return stored, stored[_HEADER.size :].reshape(len(self._layers), num_tokens, row_bytes)


def _rows(layer: torch.Tensor) -> np.ndarray:
    """The memory of a layer of the host, as [slots, bytes]."""
    return layer.flatten(1).view(torch.uint8).numpy()


def _key(name: bytes, index: int) -> str:
    return f"{name.hex()}-{index}"


def _header(name: bytes, index: int, num_tokens: int, stored: np.ndarray) -> bytes:
    return _HEADER.pack(_MAGIC, name, index, num_tokens, xxhash.xxh3_128_digest(stored[_HEADER.size :].data))


class InOrder:
    """What threads do, with its results in the order in which it was asked for."""

    def __init__(self) -> None:
        self._asked: collections.deque[tuple[Any, list[Future]]] = collections.deque()
        self._calls: queue.SimpleQueue[tuple[Callable[[], bool], Future]] = queue.SimpleQueue()
        for _ in range(NUM_THREADS):
            threading.Thread(target=self._work, daemon=True).start()

    def ask(self, what: Any, calls: Iterable[Callable[[], bool]]) -> None:
        """Have all `calls` made; `what` succeeds if they all return True. One that raises is logged and fails."""
        futures: list[Future] = []
        for call in calls:
            futures.append(Future())
            self._calls.put((call, futures[-1]))
        self._asked.append((what, futures))

    def num_ended(self) -> int:
        """How many can be taken."""
        ended = itertools.takewhile(lambda each: all(future.done() for future in each[1]), self._asked)
        return sum(1 for _ in ended)

    def take(self) -> tuple[Any, bool]:
        """The oldest, once it has ended, and whether it succeeded."""
        what, futures = self._asked.popleft()
        return what, all(future.result() for future in futures)

    def settle(self) -> None:
        """Wait until all has ended."""
        wait([future for _, futures in self._asked for future in futures])

    def _work(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                succeeded = call()
            except Exception:  # of the backend: whatever it raises, the server goes on
                logger.exception("sglang-lazy: the storage backend failed")
                succeeded = False
            future.set_result(succeeded)

"""Chunks as objects of a storage backend: what an object is, and the threads that write and read them."""

import logging
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8s32sQI12x")
_MAGIC = b"lazy-kv1"


class Ended(NamedTuple):
    """A call that has ended: what it was made for, whether it succeeded, and how many seconds it took."""

    what: Any
    succeeded: bool
    seconds: float


class Calls:
    """Calls of one kind to a backend, made in order on a thread of their own.

    act: is given a name, slots of the host, and this.
    memory: held while `act` touches the host's slots, which it must not where the calls are `abandoned`.
    staging: memory for one object, uint8. It is kept, since fresh pages cost as much as a copy.
    """

    def __init__(self, act: Callable[[bytes, torch.Tensor, "Calls"], bool]):
        self.act = act
        self.ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self.memory, self.abandoned = threading.Lock(), False
        self.staging = torch.empty(0, dtype=torch.uint8)
        self._asked: queue.SimpleQueue = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._num_asked = self._num_ended = 0
        threading.Thread(target=self._work, daemon=True).start()

    def ask(self, name: bytes, slots: torch.Tensor, what: Any) -> None:
        """slots: of the host, int64; nobody else may change them before the call has ended."""
        self._num_asked += 1
        self._asked.put((name, slots, what))

    def settle(self, patience: float) -> bool:
        """Wait until all calls have ended. False if none has ended for `patience` seconds."""
        with self._progress:
            while (before := self._num_ended) < self._num_asked:
                if not self._progress.wait_for(lambda before=before: self._num_ended > before, patience):
                    return False
        return True

    def abandon(self) -> int:
        """From now on, no call touches the host's slots; returns how many had not ended."""
        with self.memory:
            self.abandoned = True
        return self._num_asked - self._num_ended

    def _work(self) -> None:
        while not self.abandoned:
            name, slots, what = self._asked.get()
            start = time.perf_counter()
            try:
                succeeded = self.act(name, slots, self)
            except Exception:  # of the backend: whatever it raises, the server goes on
                logger.exception("sglang-lazy: the storage backend failed")
                succeeded = False
            self.ended.put(Ended(what, succeeded, time.perf_counter() - start))
            with self._progress:
                self._num_ended += 1
                self._progress.notify_all()


class ChunkObjects:
    """Moves chunks between a host pool and a backend.

    An object is a header with the chunk's name, length and checksum, then keys and values, [2, layers, tokens, heads,
    head_dim], in the type of the cache. Whatever is not such an object of that name counts as missing.
    """

    def __init__(self, backend: Any, pool: Any):
        self.backend, self.pool = backend, pool
        self.writes, self.reads = Calls(self._write), Calls(self._read)

    def settle(self, patience: float) -> bool:
        """Wait until all calls have ended. False if the backend has stopped to answer; see `Calls`."""
        return self.writes.settle(patience) and self.reads.settle(patience)

    def _write(self, name: bytes, slots: torch.Tensor, calls: Calls) -> bool:
        stored = self._new_object(len(slots), calls)
        with calls.memory:
            if calls.abandoned:
                return False
            for layer, part in self._parts(stored, len(slots)):
                torch.index_select(layer, 0, slots, out=part)
        stored[: _HEADER.size] = torch.frombuffer(bytearray(_header(name, stored)), dtype=torch.uint8)
        return self.backend.put(name.hex(), stored)

    def _read(self, name: bytes, slots: torch.Tensor, calls: Calls) -> bool:
        stored = self._new_object(len(slots), calls)
        stored[: _HEADER.size] = 0  # what was there before must not be believed
        if calls.abandoned or not self.backend.get(name.hex(), stored):
            return False
        if stored[: _HEADER.size].numpy().tobytes() != _header(name, stored):
            logger.warning("sglang-lazy: stored object %s is damaged", name.hex())
            return False
        with calls.memory:
            if calls.abandoned:
                return False
            for layer, part in self._parts(stored, len(slots)):
                layer[slots] = part
        return True

    def _new_object(self, num_tokens: int, calls: Calls) -> torch.Tensor:
        """Memory for an object, uint8."""
        size = _HEADER.size + num_tokens * self.pool.get_size_per_token()
        if len(calls.staging) < size:
            calls.staging = self.backend.new_memory(1 << (size - 1).bit_length(), calls.staging)
        return calls.staging[:size]

    def _parts(self, stored: torch.Tensor, num_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer of the host, [slots, heads, head_dim], with its part of an object."""
        layers = [*self.pool.k_data_refs, *self.pool.v_data_refs]
        payload = stored[_HEADER.size :].view(self.pool.dtype)
        return zip(layers, payload.view(len(layers), num_tokens, *layers[0].shape[1:]), strict=True)


def _header(name: bytes, stored: torch.Tensor) -> bytes:
    payload = stored[_HEADER.size :]
    return _HEADER.pack(_MAGIC, name, len(payload), zlib.crc32(payload.numpy()))


class TensorBackend:
    """One of SGLang's storage backends that take tensors of any length."""

    def __init__(self, backend: Any):
        self.backend = backend

    def new_memory(self, num_bytes: int, _old: torch.Tensor) -> torch.Tensor:
        """Memory, uint8, for objects of at most `num_bytes`, in place of what was there before."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def put(self, name: str, stored: torch.Tensor) -> bool:
        """Store an object, uint8; whether that has succeeded."""
        return bool(self.backend.batch_set([name], [stored]))

    def get(self, name: str, stored: torch.Tensor) -> bool:
        """Read an object, uint8; whether it is there."""
        if not self.backend.exists(name):
            return False
        found = self.backend.batch_get([name], [stored])
        return bool(found) and found[0] is not None


class AddressBackend(TensorBackend):
    """One that takes addresses in memory which it has registered: Mooncake."""

    def new_memory(self, num_bytes: int, old: torch.Tensor) -> torch.Tensor:
        if len(old):
            self.backend.store.unregister_buffer(old.data_ptr())
        memory = super().new_memory(num_bytes, old)
        self.backend.register_buffer(memory)
        return memory

    def put(self, name: str, stored: torch.Tensor) -> bool:
        return self.backend.set(name, target_location=stored.data_ptr(), target_sizes=len(stored))

    def get(self, name: str, stored: torch.Tensor) -> bool:
        if not self.backend.exists(name):
            return False
        return self.backend.get(name, target_location=stored.data_ptr(), target_sizes=len(stored))

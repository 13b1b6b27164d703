"""Chunks as objects in one of SGLang's storage backends: the format of an object, and the threads that move them.

A chunk of an 8B model takes hundreds of megabytes. It is stored in pieces, which several threads move in parallel. What
it does to the states of recurrent layers follows its KV in pieces of its own.
"""

import contextlib
import functools
import logging
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
import xxhash

from sglang_lazy.cache.host_memory import HostMemory
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.storage.calls import Calls

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 << 20
"""The most bytes in one object behind its header, unless a single row of the host's memory has more."""
NUM_READERS = 8
"""Threads. Prompts wait for reads; nobody waits for writes, which take cores and memory bandwidth from passes."""
FORMAT = "lazy-kv2"
"""Begins the key and the header of each object. What another release of the plugin or of SGLang has computed is never
found: its KV may differ. To be counted up when either changes."""
_HEADER = struct.Struct("<8s32sII16s")
_Tables = list[tuple[np.ndarray, np.ndarray]]
"""Buffers of the host's memory, of each row size those that an object has rows of; see `Rows.table`."""


class Gate:
    """Lets threads access the host's memory until it is closed."""

    def __init__(self) -> None:
        self._open, self._num_inside, self._left = True, 0, threading.Condition()

    @contextlib.contextmanager
    def passed(self) -> Iterator[bool]:
        """A context for access; its value says whether that is allowed."""
        with self._left:
            allowed = self._open
            self._num_inside += allowed
        try:
            yield allowed
        finally:
            with self._left:
                self._num_inside -= allowed
                self._left.notify_all()

    def close(self) -> None:
        """Allow no more access, and wait until nobody has any."""
        with self._left:
            self._open = False
            self._left.wait_for(lambda: not self._num_inside)


class Backend(Protocol):
    """Keeps objects, uint8 tensors of any length."""

    @property
    def name(self) -> str: ...

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate a uint8 buffer for `put` and `get`, to be used for as long as it lives."""

    def put(self, key: str, stored: torch.Tensor) -> bool:
        """Store an object. Returns whether that succeeded."""

    def get(self, key: str, stored: torch.Tensor) -> bool:
        """Read an object into `stored`. Returns whether it was found."""

    @property
    def can_clear(self) -> bool:
        """Whether `clear` deletes anything."""

    def clear(self) -> bool:
        """Delete all objects, and whatever else is in the same place. Returns whether that succeeded."""

    def close(self) -> None:
        """It is not used any more."""


class ChunkObjects:
    """Moves chunks between the host's memory and a backend. `written` and `read` hold the requests.

    An object is a header and a piece's KV: for each of the memory's groups, [buffers, tokens, row_bytes]. The header
    has the format, the chunk's name, the piece's index, its length in tokens and the XXH3 of its KV. An object that
    does not match the expected header counts as missing. A piece of a chunk's state is the same of one slot and some of
    the buffers: a state of large layers has many times `PIECE_BYTES`.

    One call moves all of a group. With a call for each buffer, threads would wait for each other and for the scheduler
    before each call, since everything between calls needs the GIL.

    states: the memory for states of recurrent layers, if there are any.
    """

    def __init__(self, backend: Backend, memory: HostMemory, states: HostMemory | None = None):
        self.backend = backend
        self.written, self.read = self._new_calls(LazyConfig.current().storage_writers), self._new_calls(NUM_READERS)
        self._writes, self._reads = Gate(), Gate()
        self._tokens = max(1, PIECE_BYTES // memory.token_bytes)  # of a piece
        self._tables = [rows.table for rows in memory.groups]
        self._state_pieces = [] if states is None else _pieces([rows.table for rows in states.groups])
        self._most_bytes = max(self._tokens * memory.token_bytes, *map(_slot_bytes, self._state_pieces), 0)
        self._buffers = threading.local()

    def _new_calls(self, num_threads: int) -> Calls:
        return Calls(num_threads)

    def start_write(self, name: bytes, slots: torch.Tensor, state: torch.Tensor | None, what: Any) -> None:
        """Store the KV in these slots of the host, int64, and the state in another, int64 [1], if there are states.
        They must not change before the write has ended."""
        self.written.ask(what, self._each_piece(self._write, self._writes, name, slots, state))

    def start_read(self, name: bytes, slots: torch.Tensor, state: torch.Tensor | None, what: Any) -> None:
        """Fetch KV into these slots of the host, int64, and the state into another, int64 [1], if there are states."""
        self.read.ask(what, self._each_piece(self._read, self._reads, name, slots, state))

    def drop_writes(self) -> list[Any]:
        """Forget all writes: from now on those in progress read nothing from the host's memory. Returns what they were
        requested for."""
        dropped = self.written.drop()
        self._writes.close()
        self._writes = Gate()
        return dropped

    def drop_reads(self) -> None:
        """Forget all reads: from now on those in progress write nothing to the host's memory."""
        self.read.drop()
        self._reads.close()
        self._reads = Gate()

    def stop(self) -> None:
        """End the threads."""
        self.written.stop()
        self.read.stop()

    def _each_piece(
        self, act: Callable, gate: Gate, name: bytes, slots: torch.Tensor, state: torch.Tensor | None
    ) -> Iterator[Callable[[], bool]]:
        pieces = [(self._tables, piece) for piece in slots.split(self._tokens)]
        if state is not None:
            pieces += [(tables, state) for tables in self._state_pieces]
        for index, (tables, piece) in enumerate(pieces):
            yield functools.partial(act, gate, name, index, tables, piece.numpy())

    def _write(self, gate: Gate, name: bytes, index: int, tables: _Tables, slots: np.ndarray) -> bool:
        stored, parts = self._new_object(tables, len(slots))
        with gate.passed() as allowed:
            if not allowed:
                return False
            for (rows, starts), part in zip(tables, parts, strict=True):
                np.take(rows, starts + slots, out=part, mode="clip")  # other modes copy once more
        stored[: _HEADER.size] = np.frombuffer(_header(name, index, len(slots), stored), np.uint8)
        return self.backend.put(_key(name, index), torch.from_numpy(stored))

    def _read(self, gate: Gate, name: bytes, index: int, tables: _Tables, slots: np.ndarray) -> bool:
        stored, parts = self._new_object(tables, len(slots))
        stored[: _HEADER.size] = 0  # the buffer may hold the same object's header from an earlier read
        if not self.backend.get(_key(name, index), torch.from_numpy(stored)):
            return False
        if stored[: _HEADER.size].tobytes() != _header(name, index, len(slots), stored):
            logger.warning("sglang-lazy: stored object %s is damaged", _key(name, index))
            return False
        with gate.passed() as allowed:
            if allowed:
                for (rows, starts), part in zip(tables, parts, strict=True):
                    rows[starts + slots] = part
            return allowed

    def _new_object(self, tables: _Tables, num_slots: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Memory for an object, uint8, and its rows of each table, [buffers, slots]. The thread's next object uses the
        same memory."""
        if not hasattr(self._buffers, "bytes"):
            self._buffers.bytes = self.backend.new_memory(_HEADER.size + self._most_bytes).numpy()
        stored = self._buffers.bytes[: _HEADER.size + num_slots * _slot_bytes(tables)]
        parts, end = [], _HEADER.size
        for rows, starts in tables:
            start, end = end, end + len(starts) * num_slots * rows.itemsize
            parts.append(stored[start:end].view(rows.dtype).reshape(len(starts), num_slots))
        return stored, parts


def _slot_bytes(tables: _Tables) -> int:
    return sum(len(starts) * rows.itemsize for rows, starts in tables)


def _pieces(tables: _Tables) -> list[_Tables]:
    """The buffers of `tables` in order, as many in each part as `PIECE_BYTES` have room for one slot of."""
    pieces: list[_Tables] = []
    room = 0
    for rows, starts in tables:
        while len(starts):
            if room < rows.itemsize:
                pieces.append([])
                room = PIECE_BYTES
            count = max(1, room // rows.itemsize)
            pieces[-1].append((rows, starts[:count]))
            room -= len(starts[:count]) * rows.itemsize
            starts = starts[count:]
    return pieces


def _key(name: bytes, index: int) -> str:
    return f"{FORMAT}-{name.hex()}-{index}"


def _header(name: bytes, index: int, num_tokens: int, stored: np.ndarray) -> bytes:
    checksum = xxhash.xxh3_128()
    checksum.update(stored[_HEADER.size :].data)  # lets other threads run, as `xxh3_128_digest` did not before 4.0
    return _HEADER.pack(FORMAT.encode(), name, index, num_tokens, checksum.digest())

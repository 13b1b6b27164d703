"""Put objects, uint8 tensors of any length, into SGLang's storage backends, and get them."""

import contextlib
import ctypes
import logging
import os
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

logger = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None)
_LIBC.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_WRITE_AND_WAIT = 0b111


class TensorBackend:
    """A `Backend` that takes tensors.  backend: SGLang's."""

    def __init__(self, backend: Any):
        self.backend = backend

    @property
    def name(self) -> str:
        return type(self.backend).__name__

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    @property
    def can_clear(self) -> bool:
        """SGLang's own `clear` deletes nothing."""
        return getattr(type(self.backend), "clear", HiCacheStorage.clear) is not HiCacheStorage.clear

    def clear(self) -> bool:
        try:
            return self.backend.clear() is not False  # most return nothing
        except Exception:  # the other tensor-parallel ranks wait for this one's answer
            logger.exception("sglang-lazy: the storage backend could not be cleared")
            return False

    def put(self, key: str, stored: torch.Tensor) -> bool:
        return bool(self.backend.batch_set([key], [stored]))

    def get(self, key: str, stored: torch.Tensor) -> bool:
        if not self.backend.exists(key):
            return False
        found = self.backend.batch_get([key], [stored])
        return bool(found) and found[0] is not None

    def close(self) -> None:
        if hasattr(self.backend, "close"):
            self.backend.close()


class FileBackend(TensorBackend):
    """SGLang's files. Each is on the disk before its thread writes the next.

    Otherwise the system collects gigabytes that it has yet to write. At its limit it stops whoever adds to them, if
    only by a line of a log: the scheduler, and the HTTP process.
    """

    def put(self, key: str, stored: torch.Tensor) -> bool:
        if not super().put(key, stored):
            return False
        with contextlib.suppress(FileNotFoundError):  # SGLang has evicted it
            _write_out(os.path.join(self.backend.file_path, f"{self.backend._get_suffixed_key(key)}.bin"))
        return True


def _write_out(path: str) -> None:
    """Write a file's data to the disk. `fdatasync` would also commit the journal, which log files wait for."""
    file = os.open(path, os.O_RDONLY)
    try:
        _LIBC.sync_file_range(file, 0, 0, _WRITE_AND_WAIT)
    finally:
        os.close(file)


class AddressBackend(TensorBackend):
    """A backend that takes addresses in registered memory: Mooncake."""

    def new_memory(self, num_bytes: int) -> torch.Tensor:
        memory = super().new_memory(num_bytes)
        self.backend.register_buffer(memory)
        return memory

    def put(self, key: str, stored: torch.Tensor) -> bool:
        return self.backend.set(key, target_location=stored.data_ptr(), target_sizes=len(stored))

    def get(self, key: str, stored: torch.Tensor) -> bool:
        if not self.backend.exists(key):
            return False
        return self.backend.get(key, target_location=stored.data_ptr(), target_sizes=len(stored))

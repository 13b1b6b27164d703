"""A storage backend for real servers (`dynamic` in SGLang): files, with faults that tests switch on."""

import errno
import os
import threading
from pathlib import Path

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

FAULTS = ("", "hang", "half", "full", "reset", "kept")


class HostileFile(HiCacheFile):
    """SGLang's file backend with the fault that the file `fault` in its directory names.

    hang: calls never return.  half: half of an object is written, then calls never return.
    full: the disk is full.  reset: reading fails halfway.  kept: nothing can be deleted.
    """

    def __init__(self, storage_config, _kwargs):
        super().__init__(storage_config)

    @property
    def fault(self):
        path = Path(self.file_path) / "fault"
        return path.read_text() if path.exists() else ""

    def exists(self, key):
        if self.fault == "hang":
            hang()
        return super().exists(key)

    def get(self, key, target_location, target_sizes=None):
        if self.fault == "reset":
            target_location[: len(target_location) // 2] = 0
            raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
        return super().get(key, target_location, target_sizes)

    def set(self, key, value=None, target_location=None, target_sizes=None):
        if self.fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fault == "half":
            path = Path(self.file_path) / f"{self._get_suffixed_key(key)}.bin"
            path.write_bytes(value[: len(value) // 2].numpy().tobytes())
            hang()
        return super().set(key, value, target_location, target_sizes)

    def clear(self):
        return self.fault != "kept" and super().clear()


def hang():
    threading.Event().wait()

"""Files are on the disk before their thread writes the next."""

import ctypes
import os

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

from sglang_lazy.port.cache.storage import FileBackend, TensorBackend

CACHESTAT = 451  # of every architecture
MB = 1 << 20


def num_unwritten(folder):
    """Pages of the files in this folder that the system has yet to write. OSError if it cannot say."""

    class Range(ctypes.Structure):
        _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]

    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for path in folder.iterdir():
        counts = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
        with open(path, "rb") as file:
            if libc.syscall(CACHESTAT, file.fileno(), ctypes.byref(Range(0, 0)), counts, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        total += counts[1] + counts[2]
    return total


@pytest.fixture
def backend(tmp_path):
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
    traits = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False}
    return HiCacheFile(HiCacheStorageConfig(**ranks, **traits, model_name="model"), str(tmp_path))


def test_a_file_is_written_before_the_next(backend, tmp_path):
    """Gigabytes that the system has yet to write would stop other processes."""
    stored = torch.randint(0, 256, (8 * MB,), dtype=torch.uint8)
    assert TensorBackend(backend).put("left to the system", stored)
    try:
        if not num_unwritten(tmp_path):
            pytest.skip("this file system is in memory, or writes at once")
    except OSError as error:
        pytest.skip(f"the system does not tell what it has yet to write: {error}")
    os.sync()
    for key in ("first", "second"):
        assert FileBackend(backend).put(key, stored)
        assert not num_unwritten(tmp_path)


def test_a_file_that_has_been_evicted_meanwhile(backend):
    """By SGLang's limits on the folder: it has been stored."""
    backend.batch_set = lambda keys, values: True
    assert FileBackend(backend).put("key", torch.zeros(8, dtype=torch.uint8))

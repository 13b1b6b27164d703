"""Copies of many runs of bytes by the GPU's copy engines, in one call, while its multiprocessors compute.

The driver's function is called without a binding of its own: it is exported under this name since CUDA 12.8, and keeps
the signature of that version. So nothing must be compiled.
"""

import ctypes
import functools
from collections.abc import Callable

import numpy as np

_IN_STREAM_ORDER, _OVERLAP_WITH_COMPUTE = 1, 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMCPY_FLAG_PREFER_OVERLAP_...


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_ATTRIBUTES = _Attributes(source_access_order=_IN_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
_FIRST = ctypes.c_size_t(0)  # the attributes hold from the first copy on


@functools.cache
def _batch_copy() -> Callable[..., int] | None:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuMemcpyBatchAsync
    except (OSError, AttributeError):  # no driver, or one before CUDA 12.8
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer]
    return function


def available() -> bool:
    """Whether the driver has batched copies."""
    return _batch_copy() is not None


def copy_runs(sources: np.ndarray, targets: np.ndarray, sizes: np.ndarray, stream: int) -> None:
    """Queue copies, which may run in any order and at once. Copies of other streams to the host wait for all that a
    stream has queued to go there, however many calls it was queued by; not so those to the device.

    sources, targets: [n] int64, addresses in pinned host memory or on the device. Nothing may be both read and written.
    sizes: [n] int64, bytes, each more than 0.
    stream: the handle of the stream (`torch.cuda.Stream.cuda_stream`), on the current device. Not the default stream.

    Raises RuntimeError if the driver refuses.
    """
    if not len(sizes):
        return
    function = _batch_copy()
    if function is None:
        raise RuntimeError("copy_runs: the driver has no batched copies, which came with CUDA 12.8")
    # The driver reads the lists before it returns.
    lists = [np.ascontiguousarray(values, dtype=np.uint64) for values in (targets, sources, sizes)]
    failed = ctypes.c_size_t(0)
    error = function(
        *(values.ctypes.data for values in lists),
        len(sizes),
        ctypes.byref(_ATTRIBUTES),
        ctypes.byref(_FIRST),
        1,
        ctypes.byref(failed),
        stream,
    )
    if error:
        raise RuntimeError(f"copy_runs: cuMemcpyBatchAsync returned {error} for copy {failed.value} of {len(sizes)}")

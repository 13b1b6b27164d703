"""Copies from host to device, and memory that several streams use."""

from collections.abc import Sequence

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`, in stream order. From pageable memory the copy could wait for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def ints_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 copies, in one transfer, each aligned to 16 bytes: for others Triton compiles its kernels anew."""
    sizes = [-(-len(array) // 4) * 4 for array in arrays]
    buffer = np.zeros(sum(sizes), dtype=np.int32)
    for begin, size, array in zip(np.cumsum(sizes), sizes, arrays, strict=True):
        buffer[begin - size :][: len(array)] = array
    parts = to_device(buffer, device).split(sizes)
    return [part[: len(array)] for part, array in zip(parts, arrays, strict=True)]


def read_here(tensor: torch.Tensor) -> None:
    """What is launched on the current stream reads a tensor made on another one, which may be gone before it has run:
    until then nobody else gets its memory."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

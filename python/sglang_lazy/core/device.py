"""Host-to-device copies, and tensors used on several streams."""

from collections.abc import Sequence

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy `array` to `device` in stream order, from pinned memory: a pageable copy might wait for the device."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def ints_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy int32 arrays to `device` in one transfer, each 16-byte aligned: Triton compiles other kernels otherwise."""
    sizes = [-(-len(array) // 4) * 4 for array in arrays]
    buffer = np.zeros(sum(sizes), dtype=np.int32)
    for begin, size, array in zip(np.cumsum(sizes), sizes, arrays, strict=True):
        buffer[begin - size :][: len(array)] = array
    parts = to_device(buffer, device).split(sizes)
    return [part[: len(array)] for part, array in zip(parts, arrays, strict=True)]


def read_here(tensor: torch.Tensor) -> None:
    """Mark a tensor of another stream as read on the current one, so that its memory is not reused before that."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))

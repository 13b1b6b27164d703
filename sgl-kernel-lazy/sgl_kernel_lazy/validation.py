"""Checks shared by the implementations: of shapes, dtypes, devices and strides, without device synchronization."""

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raise ValueError unless tensor has this shape (None matches any length), one of these dtypes, this device and a
    contiguous last dimension. Each layer makes some of these calls, so valid tensors pass quickly."""
    actual = tensor.shape
    if actual != shape and not _matches(actual, shape):
        expected = ["any" if e is None else e for e in shape]
        raise ValueError(f"{name}: expected shape {expected}, got {list(actual)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")
    if not tensor.is_contiguous() and tensor.stride(-1) != 1 and actual[-1] > 1:
        raise ValueError(f"{name}: expected a contiguous last dimension, got strides {list(tensor.stride())}")


def _matches(actual: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(actual) != len(shape):
        return False
    for length, expected in zip(actual, shape, strict=True):
        if expected is not None and length != expected:
            return False
    return True


def shape_of(name: str, tensor: torch.Tensor, num_dims: int) -> tuple[int, ...]:
    """The shape of a tensor. Raises ValueError unless it has that many dimensions."""
    if tensor.dim() != num_dims:
        raise ValueError(f"{name}: expected {num_dims} dimensions, got shape {list(tensor.shape)}")
    return tensor.shape


def check_indptr(name: str, indptr: torch.Tensor, most: int) -> None:
    """Raise ValueError unless indptr ascends within 0 .. most; waits for the device."""
    values = indptr.tolist()
    if values != sorted(values) or values[0] < 0 or values[-1] > most:
        raise ValueError(f"{name}: expected to ascend from 0 to at most {most}, got {values}")


def refuse(wrong: torch.Tensor, expectation: str) -> None:
    """Raise ValueError naming the first row of a batch in which anything is wrong, if any; waits for the device."""
    if wrong.any():
        raise ValueError(f"{expectation}, got others in row {int(wrong.nonzero()[0, 0])}")


def check_window(window: int | None) -> None:
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window: expected a positive int or None, got {window!r}")


def check_cos_sin(cos_sin_cache: torch.Tensor, head_dim: int, device: torch.device) -> None:
    """Check the table of angles, see `rope_cos_sin`."""
    shape = shape_of("cos_sin_cache", cos_sin_cache, 2)
    check_tensor("cos_sin_cache", cos_sin_cache, shape, (torch.float32,), device)
    rotary_dim = shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"cos_sin_cache: expected an even rotary_dim up to head_dim {head_dim}, got {rotary_dim}")

"""Linked attention in Triton."""

import torch

from sgl_kernel_lazy.triton.accumulate_attention import accumulate_attention
from sgl_kernel_lazy.triton.common import kv_dtypes
from sgl_kernel_lazy.triton.copy_rotated import copy_rotated
from sgl_kernel_lazy.triton.link_decode import decode_workspace, link_decode, plan_decode
from sgl_kernel_lazy.triton.link_extend import link_extend
from sgl_kernel_lazy.triton.link_states import link_states
from sgl_kernel_lazy.triton.window_rows import window_rows

__all__ = [
    "accumulate_attention",
    "copy_rotated",
    "decode_workspace",
    "link_decode",
    "link_extend",
    "link_states",
    "plan_decode",
    "unsupported",
    "window_rows",
]


def unsupported(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    max_segments: int,
    windowed: bool,
    sinks: bool,
    capped: bool,
) -> str | None:
    """As `sgl_kernel_lazy.torch_impl.unsupported`."""
    if kv_dtype not in (dtype, *kv_dtypes(dtype)):
        return f"{kv_dtype} caches with a model in {dtype}"
    if kv_dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return f"Triton reads {kv_dtype} from compute capability 8.9 on"
    return None

"""Linked attention in Triton."""

import torch

from sgl_kernel_lazy.layer import LayerKind
from sgl_kernel_lazy.triton.accumulate_attention import accumulate_attention
from sgl_kernel_lazy.triton.common import kv_dtypes
from sgl_kernel_lazy.triton.copy_rotated import copy_rotated
from sgl_kernel_lazy.triton.link_decode import decode_workspace, link_decode, plan_decode
from sgl_kernel_lazy.triton.link_extend import link_extend
from sgl_kernel_lazy.triton.link_states import link_states
from sgl_kernel_lazy.triton.whole_rows import whole_rows
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
    "whole_rows",
    "window_rows",
]


def unsupported(device: torch.device, kind: LayerKind, max_segments: int) -> str | None:
    """As `sgl_kernel_lazy.torch_impl.unsupported`."""
    kv_dtype = kind.kv_dtype
    if kv_dtype not in kv_dtypes(kind.dtype):
        return f"{kv_dtype} caches with a model in {kind.dtype}"
    if kv_dtype == torch.float8_e4m3fn and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return f"Triton reads {kv_dtype} from compute capability 8.9 on"
    return None

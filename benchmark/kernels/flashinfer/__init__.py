"""Linked attention with FlashInfer's kernels: one of their requests per (request, segment), merged afterwards."""

import torch

from benchmark.kernels.flashinfer.common import refusal
from benchmark.kernels.flashinfer.link_decode import decode_workspace, link_decode, plan_decode
from benchmark.kernels.flashinfer.link_extend import link_extend, plan_extend
from sgl_kernel_lazy.layer import LayerKind
from sgl_kernel_lazy.triton.accumulate_attention import accumulate_attention
from sgl_kernel_lazy.triton.copy_rotated import copy_rotated
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
    "plan_extend",
    "unsupported",
    "whole_rows",
    "window_rows",
]


def unsupported(device: torch.device, kind: LayerKind, max_segments: int) -> str | None:
    """As `sgl_kernel_lazy.torch_impl.unsupported`."""
    if device.type != "cuda":
        return "FlashInfer's kernels need a GPU"
    return refusal(kind)

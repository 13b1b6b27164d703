"""Linked attention in CUDA, for Hopper; built by FlashInfer's JIT."""

import importlib

import torch

from sgl_kernel_lazy.cuda.jit import missing
from sgl_kernel_lazy.cuda.link_decode import decode_workspace, link_decode, plan_decode
from sgl_kernel_lazy.cuda.link_extend import link_extend
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
    "unsupported",
    "whole_rows",
    "window_rows",
]


def unsupported(device: torch.device, kind: LayerKind, max_segments: int) -> str | None:
    """As `sgl_kernel_lazy.torch_impl.unsupported`."""
    # The submodules' names are those of the ops.
    decode = importlib.import_module("sgl_kernel_lazy.cuda.link_decode")
    extend = importlib.import_module("sgl_kernel_lazy.cuda.link_extend")
    return missing(device) or decode.refusal(kind) or extend.refusal(kind, max_segments)

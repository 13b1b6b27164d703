"""Linked attention in CUDA, for Hopper; built by FlashInfer's JIT."""

import importlib

from sgl_kernel_lazy.cuda.jit import missing
from sgl_kernel_lazy.cuda.link_decode import decode_workspace, link_decode, plan_decode
from sgl_kernel_lazy.cuda.link_extend import link_extend
from sgl_kernel_lazy.triton.copy_rotated import copy_rotated

__all__ = ["copy_rotated", "decode_workspace", "link_decode", "link_extend", "plan_decode", "unsupported"]


def unsupported(
    device, dtype, kv_dtype, num_qo_heads, num_kv_heads, head_dim, rotary_dim, max_segments=0
) -> str | None:
    """As `sgl_kernel_lazy.torch_impl.unsupported`."""
    if reason := missing(device):
        return reason
    # The submodules' names are those of the ops.
    decode = importlib.import_module("sgl_kernel_lazy.cuda.link_decode")
    extend = importlib.import_module("sgl_kernel_lazy.cuda.link_extend")
    if not decode.supports(dtype, head_dim, rotary_dim, num_qo_heads // num_kv_heads):
        return f"{dtype}, head_dim {head_dim}, rotary_dim {rotary_dim} or {num_qo_heads // num_kv_heads} heads a group"
    if not extend.supports(dtype, head_dim, rotary_dim):
        return f"{dtype}, head_dim {head_dim} or rotary_dim {rotary_dim} in prefill"
    if kv_dtype != dtype and not decode.supports_fp8(head_dim, rotary_dim, num_kv_heads):
        return f"{kv_dtype} caches with head_dim {head_dim}, rotary_dim {rotary_dim} and {num_kv_heads} kv heads"
    return None

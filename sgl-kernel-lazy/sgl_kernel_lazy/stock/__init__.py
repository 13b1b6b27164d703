"""Linked attention on stock FlashInfer kernels: a batch entry per (request, segment), merged afterwards."""

from sgl_kernel_lazy.stock.link_decode import decode_workspace, link_decode, plan_decode
from sgl_kernel_lazy.stock.link_extend import link_extend, plan_extend

__all__ = ["decode_workspace", "link_decode", "link_extend", "plan_decode", "plan_extend", "unsupported"]


def unsupported(device, dtype, kv_dtype, *_dims) -> str | None:
    """As `sgl_kernel_lazy.torch_impl.unsupported`."""
    return None if kv_dtype == dtype else f"{kv_dtype} caches"

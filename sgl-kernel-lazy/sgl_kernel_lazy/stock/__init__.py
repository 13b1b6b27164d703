"""Linked attention on stock FlashInfer kernels: a batch entry per (request, segment), merged afterwards."""

from sgl_kernel_lazy.stock.link_decode import decode_workspace, link_decode, plan_decode
from sgl_kernel_lazy.stock.link_extend import link_extend, plan_extend

__all__ = ["decode_workspace", "link_decode", "link_extend", "plan_decode", "plan_extend"]

"""Linked attention in Triton."""

from sgl_kernel_lazy.triton.copy_rotated import copy_rotated
from sgl_kernel_lazy.triton.link_decode import decode_workspace, link_decode, plan_decode
from sgl_kernel_lazy.triton.link_extend import link_extend

__all__ = ["copy_rotated", "decode_workspace", "link_decode", "link_extend", "plan_decode"]

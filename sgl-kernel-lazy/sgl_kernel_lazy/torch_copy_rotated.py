"""Copies of cached KV tokens with rotated keys, in plain PyTorch."""

import torch

from sgl_kernel_lazy.caches import Caches, check_copies
from sgl_kernel_lazy.contract import check_copied_slots
from sgl_kernel_lazy.rope import rotate_queries


def copy_rotated(caches: Caches, source: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> None:
    """Copy cached KV tokens to other slots, in every layer, with their keys rotated: k[target] = R(offset) k[source].

    source, target: [n] int32 or int64, slots. None is twice in target, and none in both, except where a KV token is
        copied onto itself, that is rotated in place.
    offsets: [n] int32 or int64, by how many positions each key is rotated: rows of cos_sin_cache, as in `link_decode`.
    Keys are rotated in float32 and rounded once to the caches' dtype.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """
    check_copies(caches, source, target, offsets)
    check_copied_slots(source, target, offsets, len(caches.k_caches[0]), len(caches.cos_sin_cache))
    for k_cache, v_cache in zip(caches.k_caches, caches.v_caches, strict=True):
        k_cache[target] = rotate_queries(k_cache[source], offsets, caches.cos_sin_cache, is_neox=caches.is_neox)
        v_cache[target] = v_cache[source]

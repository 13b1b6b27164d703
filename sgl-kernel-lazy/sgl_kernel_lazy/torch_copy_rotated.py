"""Copies of cached KV tokens with rotated keys, in plain PyTorch."""

from collections.abc import Sequence

import torch

from sgl_kernel_lazy.contract import check_copied_slots
from sgl_kernel_lazy.rope import rotate_queries
from sgl_kernel_lazy.validation import check_copy_inputs


def copy_rotated(
    k_caches: Sequence[torch.Tensor],
    v_caches: Sequence[torch.Tensor],
    source: torch.Tensor,
    target: torch.Tensor,
    offsets: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    is_neox: bool,
) -> None:
    """Copy cached KV tokens to other slots, in every layer, with their keys rotated: k[target] = R(offset) k[source].

    k_caches, v_caches: a cache of each layer, [num_slots, num_kv_heads, head_dim], all alike; KV tokens contiguous.
    source, target: [n] int32 or int64, slots. None is twice in target, and none in both, except where a KV token is
        copied onto itself, that is rotated in place.
    offsets: [n] int32 or int64, by how many positions each key is rotated: rows of cos_sin_cache, as in `link_decode`.
    cos_sin_cache: [num_rows, rotary_dim] fp32, see `rope_cos_sin`.
    Keys are rotated in float32 and rounded once to the caches' dtype.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """
    check_copy_inputs(k_caches, v_caches, source, target, offsets, cos_sin_cache)
    check_copied_slots(source, target, offsets, len(k_caches[0]), len(cos_sin_cache))
    for k_cache, v_cache in zip(k_caches, v_caches, strict=True):
        k_cache[target] = rotate_queries(k_cache[source], offsets, cos_sin_cache, is_neox=is_neox)
        v_cache[target] = v_cache[source]

"""Decode over cached chunks in CUDA; a chunk that several requests share is read once for all of them."""

import torch

from sgl_kernel_lazy.cuda.jit import CTYPES, KV_FP8, load_module, num_multiprocessors
from sgl_kernel_lazy.validation import check_link_inputs, check_rows

# A chunk is read once for all its users, rather than by each, from this many reads saved: (users - 1) * tokens.
MIN_SAVED_TOKENS = 64
# Tiles of what a block does before it asks for more, or 0: as the plan finds best.
SPAN = 0
# head_dim: query heads per kv head, at most
MAX_GROUP_SIZES = {64: 32, 128: 32, 256: 16}


def supports(dtype: torch.dtype, head_dim: int, rotary_dim: int, group_size: int) -> bool:
    """Whether `link_decode` takes these; whatever it refuses, `sgl_kernel_lazy.triton` takes."""
    return (
        dtype in CTYPES
        and head_dim in MAX_GROUP_SIZES
        and rotary_dim % 16 == 0
        and group_size <= MAX_GROUP_SIZES[head_dim]
    )


def supports_fp8(head_dim: int, rotary_dim: int, num_kv_heads: int) -> bool:
    """Whether `link_decode` takes fp8 caches where it takes others."""
    # As in csrc/decode_plan.cuh; what is copied at once is whole lines of 128 bytes.
    heads_at_once = next(n for n in range(min(num_kv_heads, 4), 0, -1) if num_kv_heads % n == 0)
    return head_dim <= 128 and rotary_dim % 32 == 0 and heads_at_once * head_dim % 128 == 0


def decode_workspace(max_bs, max_segments, num_qo_heads, num_kv_heads, head_dim, device):
    """A float32 buffer for `plan_decode` and `link_decode`, for every batch of at most max_bs requests of at most
    max_segments segments (the width of the segment tables); its contents never matter."""
    device = torch.device(device)
    words = load_module("decode_plan").workspace_words(
        max_bs, max_segments, num_qo_heads, num_kv_heads, head_dim, num_multiprocessors(device)
    )
    return torch.empty(words, dtype=torch.float32, device=device)


def plan_decode(
    workspace, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids,
    *, num_qo_heads, num_kv_heads, head_dim,
):  # fmt: skip
    """Write the schedule of a batch into the workspace, on the device: one launch per step, before all layers.

    Same contract as `sgl_kernel_lazy.torch_impl.plan_decode`.
    """
    check_rows(kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids, workspace.device)
    load_module("decode_plan").plan_decode(
        workspace, kv_indptr, num_segments, segment_ends, segment_offsets, segment_ids,
        num_qo_heads, num_kv_heads, head_dim, num_multiprocessors(workspace.device), MIN_SAVED_TOKENS, SPAN,
    )  # fmt: skip


def link_decode(
    q, k_cache, v_cache, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, cos_sin_cache,
    *, is_neox, sm_scale, v_scale=1.0, segment_ids=None, workspace=None, out=None, lse=None,
):  # fmt: skip
    """Same contract as `sgl_kernel_lazy.torch_impl.link_decode`, for fp16 and bf16.

    k_cache, v_cache: the heads of a slot one after another; fp8 where `supports_fp8` says so. Queries and weights are
        then multiplied as fp16.

    workspace: from `decode_workspace`, into which `plan_decode` has written this batch; allocated and planned here
        when not given. With it and `out` given nothing is allocated and the device is never waited for, so the call can
        be captured in a CUDA graph, the plan inside or outside of it.
    """
    check_link_inputs(
        q, k_cache, v_cache, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, cos_sin_cache,
        out, lse, sm_scale, v_scale, segment_ids=segment_ids,
    )  # fmt: skip
    bs, num_qo_heads, head_dim = q.shape
    if bs != num_segments.shape[0]:
        raise ValueError(f"q: expected {num_segments.shape[0]} rows, one per request, got {bs}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if bs == 0:
        return out
    num_kv_heads, max_segments, rotary_dim = k_cache.shape[1], segment_ends.shape[1], cos_sin_cache.shape[1]
    group_size = num_qo_heads // num_kv_heads
    if not supports(q.dtype, head_dim, rotary_dim, group_size):
        raise ValueError(
            f"q: expected fp16 or bf16, head_dim in {tuple(MAX_GROUP_SIZES)}, rotary_dim a multiple of 16 and at most "
            f"32 query heads per kv head (16 for head_dim 256), got {q.dtype}, {head_dim}, {rotary_dim}, {group_size}"
        )
    if k_cache.dtype in KV_FP8 and not supports_fp8(head_dim, rotary_dim, num_kv_heads):
        raise ValueError(
            f"k_cache: fp8 needs head_dim 64 or 128, rotary_dim in 32s, and heads copied at once that take a multiple "
            f"of 128 bytes, got {head_dim}, {rotary_dim} and {num_kv_heads} heads"
        )
    kv_indices = kv_indices.to(torch.int32)
    if workspace is None:
        workspace = decode_workspace(bs, max_segments, num_qo_heads, num_kv_heads, head_dim, q.device)
        segment_ids = torch.full_like(segment_ends, -1) if segment_ids is None else segment_ids
        plan_decode(
            workspace, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids,
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        )  # fmt: skip
    module = load_module(
        "link_decode",
        dtype=CTYPES[q.dtype], kv_fp8=KV_FP8.get(k_cache.dtype, 0), head_dim=head_dim, rotary_dim=rotary_dim,
        is_neox=int(is_neox),
    )  # fmt: skip
    module.link_decode(
        q, k_cache, v_cache, kv_indices, max_segments, cos_sin_cache, workspace, out, lse,
        sm_scale, v_scale, num_multiprocessors(q.device),
    )  # fmt: skip
    return out

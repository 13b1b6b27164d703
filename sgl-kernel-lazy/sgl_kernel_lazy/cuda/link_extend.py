"""Prefill of new text over cached chunks in CUDA."""

import functools

import torch

from sgl_kernel_lazy.cuda.jit import CTYPES, KV_FP8, load_module, num_multiprocessors
from sgl_kernel_lazy.validation import check_extend_inputs

# Packed rows of a work item, and head_dim: entries of a tile. Heads of 256 have small items only.
BLOCK_M, SMALL_BLOCK_M, BLOCK_N = 128, 64, {64: 128, 128: 128, 256: 64}
# The runs of a request, 16 bytes each, share a block's shared memory with its tiles.
MAX_SEGMENTS = 1900
# Tiles of a batch up to which no request is split: merging would take longer.
WORTH_SPLITTING = 4


def supports(dtype: torch.dtype, head_dim: int, rotary_dim: int, max_segments: int = 0) -> bool:
    """Whether `link_extend` takes these; whatever it refuses, `sgl_kernel_lazy.triton` takes."""
    return dtype in CTYPES and head_dim in BLOCK_N and rotary_dim % 16 == 0 and max_segments <= MAX_SEGMENTS


@functools.lru_cache(maxsize=1024)
def _plan(bs, nnz_qo, nnz_kv, max_extend_len, num_qo_heads, num_kv_heads, head_dim, num_multiprocessors):
    """(block_m, max_items, max_partials): room for the splits that the device chooses, which knows all lengths.

    nnz_kv may be an upper bound.
    """
    group = num_qo_heads // num_kv_heads
    block_m = SMALL_BLOCK_M if head_dim == 256 or max_extend_len * group <= SMALL_BLOCK_M else BLOCK_M
    row_tiles = min(bs * -(-max_extend_len * group // block_m), (nnz_qo * group + bs * (block_m - 1)) // block_m)
    items = row_tiles * num_kv_heads
    if nnz_kv <= WORTH_SPLITTING * BLOCK_N[head_dim]:
        return block_m, items, 0
    # Parts of at least a multiprocessor's share of all tiles: this many items more, and at most twice as many parts.
    return block_m, items + num_multiprocessors, 2 * num_multiprocessors


def link_extend(
    q, k_cache, v_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
    num_segments, segment_ends, segment_offsets, cos_sin_cache,
    *, max_extend_len, is_neox, sm_scale, v_scale=1.0, out=None, lse=None, validate=True,
):  # fmt: skip
    """Same contract as `sgl_kernel_lazy.torch_impl.link_extend`, for what `supports` says; never waits for the device.

    Rows of q, k_cache, v_cache, cos_sin_cache and out begin at multiples of 16 bytes. fp8 caches are for
    head_dim 64 and 128; queries and weights are then multiplied as fp16.
    """
    if validate:
        check_extend_inputs(
            q, k_cache, v_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
            num_segments, segment_ends, segment_offsets, cos_sin_cache, max_extend_len, out, lse, sm_scale,
            v_scale,
        )  # fmt: skip
    nnz_qo, num_qo_heads, head_dim = q.shape
    num_kv_heads, rotary_dim, max_segments = k_cache.shape[1], cos_sin_cache.shape[1], segment_ends.shape[1]
    if validate:
        if not supports(q.dtype, head_dim, rotary_dim, max_segments):
            raise ValueError(
                f"q: expected fp16 or bf16, head_dim in {tuple(BLOCK_N)}, rotary_dim a multiple of 16 and at most "
                f"{MAX_SEGMENTS} segments, got {q.dtype}, {head_dim}, {rotary_dim} and {max_segments}"
            )
        if k_cache.dtype in KV_FP8 and head_dim > 128:
            raise ValueError(f"k_cache: fp8 needs head_dim 64 or 128, got {head_dim}")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if nnz_qo == 0 or max_extend_len == 0:
        return out
    multiprocessors = num_multiprocessors(q.device)
    block_m, max_items, max_partials = _plan(
        num_segments.shape[0], nnz_qo, kv_indices.shape[0], max_extend_len, num_qo_heads, num_kv_heads, head_dim,
        multiprocessors,
    )  # fmt: skip
    partial_out = partial_lse = None
    if max_partials > 0:
        partial_out = torch.empty(max_partials, block_m, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(max_partials, block_m, dtype=torch.float32, device=q.device)
    module = load_module(
        "link_extend",
        dtype=CTYPES[q.dtype], kv_fp8=KV_FP8.get(k_cache.dtype, 0), head_dim=head_dim, rotary_dim=rotary_dim,
        is_neox=int(is_neox),
    )  # fmt: skip
    module.link_extend(
        q, k_cache, v_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions, num_segments, segment_ends,
        segment_offsets, cos_sin_cache, out, lse, partial_out, partial_lse, block_m, max_items, multiprocessors,
        sm_scale, v_scale,
    )  # fmt: skip
    return out

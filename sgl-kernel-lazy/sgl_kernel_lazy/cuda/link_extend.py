"""Prefill of new text over cached chunks in CUDA."""

import functools
from typing import Any

import torch

from sgl_kernel_lazy.cuda.jit import CTYPES, KV_FP8, kernel_sinks, load_module
from sgl_kernel_lazy.device import num_sms
from sgl_kernel_lazy.layer import Layer, LayerKind, check_queries
from sgl_kernel_lazy.rows import ExtendRows

# Packed rows of a work item, and KV tokens of a tile by head_dim. Heads of 256 have only small items.
BLOCK_M, SMALL_BLOCK_M, BLOCK_N = 128, 64, {64: 128, 128: 128, 256: 64}
# Under windows up to this long an item is mostly latency. Then items and tiles are small: several run on an SM at once.
SHORT_WINDOW, SHORT_BLOCK_N = 512, 64
# The runs of a request, 16 bytes each and two for each segment under a window, share a block's shared memory with its
# tiles.
MAX_SEGMENTS, MAX_SEGMENTS_WINDOWED = 1900, 949
NO_WINDOW = 2**31 - 1
# Requests that see at most this many tiles are not split: merging would take longer.
WORTH_SPLITTING = 4


def refusal(kind: LayerKind, max_segments: int) -> str | None:
    """The unmet requirement of `link_extend`, or None; `sgl_kernel_lazy.triton` supports all that it refuses."""
    if kind.dtype not in CTYPES:
        return f"expected queries in {' or '.join(map(str, CTYPES))}, got {kind.dtype}"
    if kind.head_dim not in BLOCK_N:
        return f"expected head_dim to be one of {tuple(BLOCK_N)}, got {kind.head_dim}"
    if kind.rotary_dim % 16:
        return f"expected rotary_dim to be a multiple of 16, got {kind.rotary_dim}"
    if max_segments > (most := MAX_SEGMENTS_WINDOWED if kind.windowed else MAX_SEGMENTS):
        return f"expected at most {most} segments per request, got {max_segments}"
    if kind.kv_dtype in KV_FP8 and kind.head_dim > 128:
        return f"expected for {kind.kv_dtype} caches head_dim 64 or 128, got {kind.head_dim}"
    return None


def _blocks(head_dim: int, max_packed_rows: int, window: int | None) -> tuple[int, int]:
    """(block_m, block_n): packed rows of a work item and KV tokens of a tile. Together they name a kernel."""
    if head_dim <= 128 and window is not None and window <= SHORT_WINDOW:
        return SMALL_BLOCK_M, SHORT_BLOCK_N
    return SMALL_BLOCK_M if head_dim == 256 or max_packed_rows <= SMALL_BLOCK_M else BLOCK_M, BLOCK_N[head_dim]


@functools.lru_cache(maxsize=1024)
def _room(
    block_m: int,
    bs: int,
    nnz_qo: int,
    max_seen: int,
    max_extend_len: int,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    sms: int,
) -> tuple[int, int]:
    """(max_items, max_partials): limits for the splits chosen on the device.

    max_seen: the largest number of KV tokens that a work item sees, if its rows are adjacent.
    """
    row_tiles = min(
        bs * -(-max_extend_len * group_size // block_m), (nnz_qo * group_size + bs * (block_m - 1)) // block_m
    )
    items = row_tiles * num_kv_heads
    if max_seen <= WORTH_SPLITTING * BLOCK_N[head_dim]:
        return items, 0
    # Parts no shorter than an SM's share of all tiles: so many more items, and at most twice as many parts.
    return items + sms, 2 * sms


@functools.cache
def _module(kind: LayerKind, is_neox: bool, max_segments: int) -> Any:
    """The kernels for such a layer. Raises ValueError where there are none."""
    if reason := refusal(kind, max_segments):
        raise ValueError(f"link_extend: {reason}")
    return load_module(
        "link_extend",
        dtype=CTYPES[kind.dtype], kv_fp8=KV_FP8.get(kind.kv_dtype, 0), head_dim=kind.head_dim,
        rotary_dim=kind.rotary_dim, is_neox=int(is_neox), windowed=int(kind.windowed), capped=int(kind.capped),
    )  # fmt: skip


def link_extend(
    q: torch.Tensor, layer: Layer, rows: ExtendRows, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as `sgl_kernel_lazy.torch_impl.link_extend`, for fp16 and bf16; without device synchronization.

    Rows of q, k_cache, v_cache, cos_sin_cache and out begin at multiples of 16 bytes. fp8 caches are for head_dim 64
    and 128; queries and weights are then multiplied as fp16.
    """
    check_queries(q, layer, rows, out, lse)
    num_qo_heads, num_kv_heads, head_dim = layer.dims
    module = _module(layer.kind, layer.is_neox, rows.max_segments)
    nnz_qo, nnz_kv, max_extend_len, window = rows.num_queries, rows.num_listed, rows.max_extend_len, layer.window
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if nnz_qo == 0 or max_extend_len == 0:
        return out
    sms, group_size = num_sms(q.device), num_qo_heads // num_kv_heads
    max_seen = nnz_kv if window is None else min(nnz_kv, window + BLOCK_M)
    block_m, block_n = _blocks(head_dim, max_extend_len * group_size, window)
    max_items, max_partials = _room(
        block_m, rows.bs, nnz_qo, max_seen, max_extend_len, group_size, num_kv_heads, head_dim, sms
    )
    partial_out = partial_lse = None
    if max_partials > 0:
        partial_out = torch.empty(max_partials, block_m, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(max_partials, block_m, dtype=torch.float32, device=q.device)
    module.link_extend(
        q, layer.k_cache, layer.v_cache,
        rows.qo_indptr, rows.q_positions, rows.kv_indptr, rows.kv_indices, rows.kv_positions,
        rows.num_segments, rows.segment_ends, rows.segment_offsets, layer.cos_sin_cache, kernel_sinks(layer), out, lse,
        partial_out, partial_lse, block_m, block_n, max_items, sms,
        layer.sm_scale, layer.v_scale, window or NO_WINDOW, layer.logit_cap or 0.0,
    )  # fmt: skip
    return out

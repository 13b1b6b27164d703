"""Decode over cached chunks: split-KV attention whose query tile is rotated back for each chunk."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sgl_kernel_lazy.device import num_sms, shared_memory
from sgl_kernel_lazy.layer import Layer, check_queries
from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.triton.common import (
    accumulate,
    accumulator,
    block_sizes,
    check_caches,
    finish,
    jit,
    merge_splits,
    operand_size,
    partner_dim,
    rotate_back,
    score_scales,
    share_beside_sink,
    table_block,
)
from sgl_kernel_lazy.validation import check_tensor


class Launch(NamedTuple):
    """How the kernel is launched.

    tile_bytes: of a tile of keys.
    programs: how many run on an SM at a time; as many are launched, with equal spans, so that all begin and end
        together.
    """

    tile_bytes: int
    num_warps: int
    num_stages: int
    programs: int


# Keys are found through kv_indices, and a load that depends on another takes two pipeline stages: 2n + 1 stages keep n
# tiles in flight. Small tiles suit short chunks, and many of them a kernel that only waits for memory. Results of 512
# dimensions take the registers of more warps, and fewer such programs fit.
USUAL, WIDE = Launch(8192, 2, 5, 4), Launch(32768, 8, 5, 1)
WIDE_SHARED_MEMORY = 160 << 10  # bytes


@functools.cache
def _launch(head_dim: int, dtype: torch.dtype, device: torch.device) -> Launch:
    wide = head_dim > 256 and operand_size(dtype) == 2 and shared_memory(device) >= WIDE_SHARED_MEMORY
    return WIDE if wide else USUAL


@triton.jit
def _span_size(kv_indptr, bs, num_spans, BLOCK_N: tl.constexpr):
    """The number of KV tokens in each of the equal spans into which the concatenated rows are cut."""
    return tl.cdiv(tl.cdiv(tl.load(kv_indptr + bs), num_spans), BLOCK_N) * BLOCK_N


@jit
def _link_decode_kernel(
    q, k_cache, v_cache, partial_out, partial_lse,
    kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, cos_sin_cache,
    bs, v_scale,
    stride_q_row, stride_q_head, stride_k_slot, stride_k_head, stride_v_slot, stride_v_head,
    stride_ends, stride_offsets, stride_position,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    SCALE_LOG2: tl.constexpr, CAP_SCALE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_BS: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """One span of the batch's KV tokens, for up to BLOCK_H query heads of one kv head.

    Writes partial_out[span + b, head] (normalised) and partial_lse[span + b, head] (base 2) for every request b with
    KV tokens in the span. No two such pairs have the same sum, since span or b grows from one pair to the next.
    """
    TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    span = tl.program_id(1)
    size = _span_size(kv_indptr, bs, tl.num_programs(1), BLOCK_N)
    low = span * size
    high = tl.minimum(low + size, tl.load(kv_indptr + bs))
    request = tl.arange(0, BLOCK_BS)
    row_ends = tl.load(kv_indptr + 1 + request, mask=request < bs, other=2147483647)
    first_request = tl.sum((row_ends <= low).to(tl.int32), 0)
    last_request = tl.where(low < high, tl.sum((row_ends < high).to(tl.int32), 0), -1)

    kv_head = tl.program_id(0) // TILES
    head_in_group = tl.program_id(0) % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    head = kv_head * GROUP + head_in_group
    dim = tl.arange(0, BLOCK_D)
    q_mask = (head_in_group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    k_rows = k_cache + kv_head * stride_k_head
    v_rows = v_cache + kv_head * stride_v_head
    segment = tl.arange(0, BLOCK_SEGMENTS)
    for b in range(first_request, last_request + 1):
        row_begin = tl.load(kv_indptr + b)
        begin = tl.maximum(low - row_begin, 0)
        end = tl.minimum(high, tl.load(kv_indptr + b + 1)) - row_begin
        q_rows = q + tl.cast(b, tl.int64) * stride_q_row + head[:, None] * stride_q_head
        q_stored = tl.load(q_rows + dim[None, :], mask=q_mask, other=0.0)
        q_partner = tl.load(q_rows + partner_dim(dim, ROTARY_DIM, IS_NEOX)[None, :], mask=q_mask, other=0.0)
        segments = tl.load(num_segments + b)
        table = tl.load(segment_ends + b * stride_ends + segment, mask=segment < segments, other=2147483647)
        first_segment = tl.sum((table <= begin).to(tl.int32), 0)
        last_segment = tl.sum((table < end).to(tl.int32), 0)

        acc = tl.zeros([BLOCK_H, BLOCK_D], ACC)
        row_max = tl.full([BLOCK_H], float("-inf"), ACC)
        row_sum = tl.zeros([BLOCK_H], ACC)
        for s in range(first_segment, last_segment + 1):
            is_chunk = s < segments
            segment_end = tl.minimum(tl.load(segment_ends + b * stride_ends + s, mask=is_chunk, other=2147483647), end)
            offset = tl.load(segment_offsets + b * stride_offsets + s, mask=is_chunk, other=0)
            q_tile = rotate_back(
                q_stored, q_partner, dim, offset, cos_sin_cache, stride_position, ROTARY_DIM, IS_NEOX, ACC
            )
            for start in range(begin, segment_end, BLOCK_N):
                place = start + tl.arange(0, BLOCK_N)
                within = place < segment_end
                slot = tl.load(kv_indices + row_begin + place, mask=within, other=0).to(tl.int64)
                kv_mask = within[:, None] & (dim < HEAD_DIM)[None, :]
                k = tl.load(k_rows + slot[:, None] * stride_k_slot + dim[None, :], mask=kv_mask, other=0.0)
                v = tl.load(v_rows + slot[:, None] * stride_v_slot + dim[None, :], mask=kv_mask, other=0.0)
                acc, row_max, row_sum = accumulate(
                    q_tile, k, v, within[None, :], acc, row_max, row_sum, SCALE_LOG2, CAP_SCALE
                )
            begin = segment_end

        out, lse = finish(acc, row_max, row_sum)
        row = tl.cast(span + b, tl.int64) * (GROUP * tl.num_programs(0) // TILES) + head
        tl.store(partial_out + row[:, None] * HEAD_DIM + dim[None, :], out * v_scale, mask=q_mask)
        tl.store(partial_lse + row, lse, mask=head_in_group < GROUP)


@jit
def _merge_kernel(
    partial_out, partial_lse, sinks, out, lse, kv_indptr, bs, num_spans,
    stride_out_row, stride_out_head, stride_lse_row,
    HEAD_DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out[b, head] and lse[b, head] from the spans that hold KV tokens of request b."""
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    b = tl.program_id(1)
    size = tl.maximum(_span_size(kv_indptr, bs, num_spans, BLOCK_N), 1)
    begin, end = tl.load(kv_indptr + b), tl.load(kv_indptr + b + 1)
    first = begin // size
    count = tl.where(begin < end, (end - 1) // size + 1 - first, 0)
    result, result_lse = merge_splits(
        partial_out, partial_lse, (first + b) * num_heads + head, count, num_heads, HEAD_DIM, ACC, BLOCK_D, BLOCK_S
    )
    if sinks is not None:
        result *= share_beside_sink(tl.load(sinks + head), result_lse)
    dim = tl.arange(0, BLOCK_D)
    row = out + b.to(tl.int64) * stride_out_row + head * stride_out_head
    tl.store(row + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    if lse is not None:
        tl.store(lse + b.to(tl.int64) * stride_lse_row + head, result_lse)


@functools.cache
def _plan(
    num_qo_heads: int,
    num_kv_heads: int,
    programs: int,
    device: torch.device,
) -> tuple[int, int]:
    """(BLOCK_H, num_spans): query heads per tile, and spans of the batch, from static shapes alone.

    programs: per SM.
    """
    group = num_qo_heads // num_kv_heads
    block_h = min(64, max(16, triton.next_power_of_2(group)))
    programs_per_span = num_kv_heads * triton.cdiv(group, block_h)
    return block_h, max(1, programs * num_sms(device) // programs_per_span)


def decode_workspace(
    max_bs: int,
    max_segments: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> torch.Tensor:
    """A float32 buffer for `link_decode`, for batch sizes up to max_bs; it may be uninitialized.

    It takes 4 * num_qo_heads * (head_dim + 2) bytes per request and per span, of which there are a few hundred.
    """
    _, num_spans = _plan(num_qo_heads, num_kv_heads, USUAL.programs, torch.device(device))  # no launch has more
    return torch.empty((num_spans + max_bs) * num_qo_heads * (head_dim + 2), dtype=torch.float32, device=device)


def plan_decode(
    workspace: torch.Tensor | None,
    rows: Rows,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Do nothing: each program finds its span by itself."""


def link_decode(
    q: torch.Tensor,
    layer: Layer,
    rows: Rows,
    *,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same contract as `sgl_kernel_lazy.torch_impl.link_decode`, fp8 caches with fp16 and bf16 queries.

    With workspace and out, the call allocates nothing; the grid depends only on shapes and there is no device
    synchronization, so it can be captured in a CUDA graph.
    """
    check_queries(q, layer, rows, out, lse)
    check_caches(layer)
    bs, (num_qo_heads, num_kv_heads, head_dim) = rows.bs, layer.dims
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if bs == 0:
        return out
    group = num_qo_heads // num_kv_heads
    launch = _launch(head_dim, q.dtype, q.device)
    block_h, num_spans = _plan(num_qo_heads, num_kv_heads, launch.programs, q.device)
    if workspace is None:
        workspace = decode_workspace(bs, rows.max_segments, *layer.dims, q.device)
    check_tensor("workspace", workspace, (None,), (torch.float32,), q.device)
    parts = (num_spans + bs) * num_qo_heads
    if workspace.numel() < parts * (head_dim + 2):
        raise ValueError(f"workspace: expected at least {parts * (head_dim + 2)} elements, got {workspace.numel()}")
    acc, acc_dtype = accumulator(q.dtype)
    # An lse takes two elements of the workspace if it is float64, else one.
    partial_out, partial_lse = workspace[: parts * (head_dim + 2)].split([parts * head_dim, parts * 2])
    partial_lse = partial_lse.view(acc_dtype)

    k_cache, v_cache, cos_sin_cache = layer.k_cache, layer.v_cache, layer.cos_sin_cache
    blocks = block_sizes(head_dim, q.dtype, launch.tile_bytes)
    _link_decode_kernel[(num_kv_heads * triton.cdiv(group, block_h), num_spans)](
        q, k_cache, v_cache, partial_out, partial_lse,
        rows.kv_indptr, rows.kv_indices, rows.num_segments, rows.segment_ends, rows.segment_offsets, cos_sin_cache,
        bs, layer.v_scale,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        rows.segment_ends.stride(0), rows.segment_offsets.stride(0), cos_sin_cache.stride(0),
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=layer.kind.rotary_dim, IS_NEOX=layer.is_neox,
        **score_scales(layer.sm_scale, layer.logit_cap), ACC=acc, BLOCK_H=block_h, **blocks,
        BLOCK_BS=table_block(bs, least=128), BLOCK_SEGMENTS=table_block(rows.max_segments, least=16),
        num_warps=launch.num_warps, num_stages=launch.num_stages,
    )  # fmt: skip
    _merge_kernel[(num_qo_heads, bs)](
        partial_out, partial_lse, layer.sinks, out, lse, rows.kv_indptr, bs, num_spans,
        out.stride(0), out.stride(1), lse.stride(0) if lse is not None else 0,
        HEAD_DIM=head_dim, ACC=acc, **blocks, BLOCK_S=64, num_warps=4,
    )  # fmt: skip
    return out

"""Sums of attention weights per KV token: first the log-sum-exp of each query row and head, then the sums.

A program of the first kernel keeps its queries and loops over keys, so it rotates the queries, like `link_extend`. A
program of the second keeps its keys and loops over queries, so it rotates the keys to their positions in the prompt.
"""

import torch
import triton
import triton.language as tl

from sgl_kernel_lazy.device import num_sms
from sgl_kernel_lazy.layer import Layer, check_sums_and_queries
from sgl_kernel_lazy.rows import ExtendRows
from sgl_kernel_lazy.triton.common import (
    accumulator,
    block_sizes,
    capped,
    check_caches,
    jit,
    partner_dim,
    place_in_pairs,
    rotate_back,
    score_scales,
    softmax_step,
    table_block,
)

# Bytes of a tile of keys, and of a tile of queries at most; how many programs per SM the KV tokens are split for, and
# into how many splits at most.
TILE_BYTES, QUERY_TILE_BYTES, PROGRAMS, MAX_SPLITS = 16384, 32768, 4, 64


@triton.jit
def _query_rows(packed, kv_head, b, qo_indptr, q_positions, GROUP: tl.constexpr):
    """Token, head, existence and position of packed rows (token, query head) of request b and a kv head."""
    begin = tl.load(qo_indptr + b)
    token = begin + packed // GROUP
    known = token < tl.load(qo_indptr + b + 1)
    q_position = tl.load(q_positions + token, mask=known, other=-1).to(tl.int32)
    return token.to(tl.int64), kv_head * GROUP + packed % GROUP, known, q_position


@triton.jit
def _offsets_at(place, segments, segment_ends, segment_offsets, BLOCK_SEGMENTS: tl.constexpr):
    """Offsets of the KV tokens at these places of a row. A binary search counts the segments that end before each."""
    before = tl.zeros_like(place)
    step = tl.full([], BLOCK_SEGMENTS, tl.int32)
    while step > 0:
        end = tl.load(segment_ends + before + step - 1, mask=before + step <= segments, other=2147483647)
        before = tl.where(end <= place, before + step, before)
        step = step // 2
    return tl.load(segment_offsets + before, mask=before < segments, other=0)


@jit
def _lse_kernel(
    q, k_cache, partial_lse,
    qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
    num_segments, segment_ends, segment_offsets, cos_sin_cache,
    nnz_qo, num_splits,
    stride_q_row, stride_q_head, stride_k_slot, stride_k_head, stride_ends, stride_offsets, stride_position,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    SCALE_LOG2: tl.constexpr, CAP_SCALE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M packed rows (token, query head) of one request and one kv head, over one split of the request's row.

    Writes their lse (natural log, ACC) to partial_lse[split, token, head].
    """
    LN2: tl.constexpr = 0.6931471805599453
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    b = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    packed = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head, known, q_position = _query_rows(packed, kv_head, b, qo_indptr, q_positions, GROUP)
    if tl.max(known.to(tl.int32), 0) == 0:
        return
    row_begin = tl.load(kv_indptr + b)
    row_length = tl.load(kv_indptr + b + 1) - row_begin
    size = tl.cdiv(tl.cdiv(row_length, num_splits), BLOCK_N) * BLOCK_N
    low = tl.minimum(split * size, row_length)
    high = tl.minimum(low + size, row_length)

    dim = tl.arange(0, BLOCK_D)
    q_mask = known[:, None] & (dim < HEAD_DIM)[None, :]
    q_rows = q + token[:, None] * stride_q_row + head[:, None] * stride_q_head
    q_stored = tl.load(q_rows + dim[None, :], mask=q_mask, other=0.0)
    q_partner = tl.load(q_rows + partner_dim(dim, ROTARY_DIM, IS_NEOX)[None, :], mask=q_mask, other=0.0)
    k_rows = k_cache + kv_head * stride_k_head

    segment = tl.arange(0, BLOCK_SEGMENTS)
    segments = tl.load(num_segments + b)
    table = tl.load(segment_ends + b * stride_ends + segment, mask=segment < segments, other=2147483647)
    first_run = tl.sum((table <= low).to(tl.int32), 0)
    last_run = tl.sum((table < high).to(tl.int32), 0)
    row_max = tl.full([BLOCK_M], float("-inf"), ACC)
    row_sum = tl.zeros([BLOCK_M], ACC)
    begin = low
    for run in range(first_run, last_run + 1):
        is_chunk = run < segments
        end = tl.minimum(tl.load(segment_ends + b * stride_ends + run, mask=is_chunk, other=2147483647), high)
        offset = tl.load(segment_offsets + b * stride_offsets + run, mask=is_chunk, other=0)
        q_tile = rotate_back(q_stored, q_partner, dim, offset, cos_sin_cache, stride_position, ROTARY_DIM, IS_NEOX, ACC)
        for start in range(begin, end, BLOCK_N):
            place = start + tl.arange(0, BLOCK_N)
            within = place < end
            slot = tl.load(kv_indices + row_begin + place, mask=within, other=0).to(tl.int64)
            kv_position = tl.load(kv_positions + row_begin + place, mask=within, other=2147483647)
            kv_mask = within[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(k_rows + slot[:, None] * stride_k_slot + dim[None, :], mask=kv_mask, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k.to(q_tile.dtype)), input_precision="ieee", out_dtype=ACC)
            scores = capped(scores, CAP_SCALE)
            scores = tl.where(kv_position[None, :] <= q_position[:, None], scores, float("-inf"))
            weights, decay, row_max = softmax_step(scores, row_max, SCALE_LOG2)
            row_sum = row_sum * decay + tl.sum(weights, 1)
        begin = end

    row = (split * nnz_qo + token) * (num_kv_heads * GROUP) + head
    # A row that has seen nothing keeps -inf.
    tl.store(partial_lse + row, (row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))) * LN2, mask=known)


@jit
def _sum_kernel(
    sums, q, k_cache, lse,
    qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
    num_segments, segment_ends, segment_offsets, cos_sin_cache,
    stride_q_row, stride_q_head, stride_k_slot, stride_k_head, stride_ends, stride_offsets, stride_position,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr, SCALE_LOG2: tl.constexpr, CAP_SCALE: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """sums += the weights of BLOCK_N KV tokens of one request, summed over all of its query rows and heads.

    lse: [nnz_qo, num_qo_heads] ACC, natural log. Deterministic: no other program adds to the same sums, and the order
    of rows and heads is fixed.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    b = tl.program_id(1)
    packed_rows = (tl.load(qo_indptr + b + 1) - tl.load(qo_indptr + b)) * GROUP
    row_begin = tl.load(kv_indptr + b)
    row_length = tl.load(kv_indptr + b + 1) - row_begin
    first = tl.program_id(0) * BLOCK_N
    if (first >= row_length) | (packed_rows == 0):
        return
    place = first + tl.arange(0, BLOCK_N)
    within = place < row_length
    slot = tl.load(kv_indices + row_begin + place, mask=within, other=0).to(tl.int64)
    kv_position = tl.load(kv_positions + row_begin + place, mask=within, other=2147483647)
    offset = _offsets_at(
        place, tl.load(num_segments + b), segment_ends + b * stride_ends, segment_offsets + b * stride_offsets,
        BLOCK_SEGMENTS,
    )  # fmt: skip

    dim = tl.arange(0, BLOCK_D)
    kv_mask = within[:, None] & (dim < HEAD_DIM)[None, :]
    frequency, begins_pair = place_in_pairs(dim, ROTARY_DIM, IS_NEOX)
    angles = cos_sin_cache + offset.to(tl.int64)[:, None] * stride_position + frequency[None, :]
    # Each element sums one row of every tile: a reduction in each iteration would cost more than these registers.
    total = tl.zeros([BLOCK_N, BLOCK_M], ACC)
    for kv_head in range(NUM_KV_HEADS):
        k_rows = k_cache + kv_head * stride_k_head + slot[:, None] * stride_k_slot
        k = tl.load(k_rows + dim[None, :], mask=kv_mask, other=0.0)
        k_partner = tl.load(k_rows + partner_dim(dim, ROTARY_DIM, IS_NEOX)[None, :], mask=kv_mask, other=0.0)
        cos = tl.load(angles, mask=(dim < ROTARY_DIM)[None, :], other=1.0)
        sin = tl.load(angles + ROTARY_DIM // 2, mask=(dim < ROTARY_DIM)[None, :], other=0.0)
        k = k.to(ACC) * cos + k_partner.to(ACC) * tl.where(begins_pair[None, :], -sin, sin)
        if q.dtype.element_ty != tl.float32:
            k = k.to(q.dtype.element_ty)
        for begin in range(0, packed_rows, BLOCK_M):
            packed = begin + tl.arange(0, BLOCK_M)
            token, head, known, q_position = _query_rows(packed, kv_head, b, qo_indptr, q_positions, GROUP)
            q_rows = q + token[:, None] * stride_q_row + head[:, None] * stride_q_head
            q_tile = tl.load(q_rows + dim[None, :], mask=known[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
            row_lse = tl.load(lse + token * (NUM_KV_HEADS * GROUP) + head, mask=known, other=0.0)
            scores = tl.dot(k, tl.trans(q_tile.to(k.dtype)), input_precision="ieee", out_dtype=ACC)
            scores = capped(scores, CAP_SCALE)
            visible = kv_position[:, None] <= q_position[None, :]
            total += tl.where(visible, tl.exp2(scores * SCALE_LOG2 - row_lse[None, :] * LOG2E), 0.0)
    target = sums + row_begin + place
    tl.store(target, tl.load(target, mask=within) + tl.sum(total, 1).to(tl.float32), mask=within)


def _tiles(packed_rows: int, head_dim: int, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, int]]:
    """BLOCK_M, BLOCK_D and BLOCK_N for requests of up to packed_rows rows, and the warps and stages of both kernels."""
    most = block_sizes(head_dim, dtype, QUERY_TILE_BYTES)["BLOCK_N"]
    block_m = min(most, max(16, triton.next_power_of_2(packed_rows)))
    return (
        dict(BLOCK_M=block_m, **block_sizes(head_dim, dtype, TILE_BYTES)),
        dict(num_warps=8 if block_m > 32 else 4, num_stages=3),
    )


def _num_splits(bs: int, row_tiles: int, kv_tiles: int, num_kv_heads: int, num_sms: int) -> int:
    """The number of splits of the KV tokens with which few queries over long rows fill the GPU.

    row_tiles, kv_tiles: of a request, on average or at most; if requests differ, that only costs time.
    """
    return max(1, min(MAX_SPLITS, kv_tiles, PROGRAMS * num_sms // (bs * num_kv_heads * row_tiles)))


def accumulate_attention(sums: torch.Tensor, q: torch.Tensor, layer: Layer, rows: ExtendRows) -> None:
    """Same contract as `sgl_kernel_lazy.torch_impl.accumulate_attention`, fp8 caches with fp16 and bf16 queries; never
    waits for the device.

    It allocates one number per query row, head and split of the KV tokens, of which there are at most MAX_SPLITS.
    """
    check_sums_and_queries(sums, q, layer, rows)
    check_caches(layer)
    num_qo_heads, num_kv_heads, head_dim = layer.dims
    bs, nnz_qo, nnz_kv, max_extend_len = rows.bs, rows.num_queries, rows.num_listed, rows.max_extend_len
    if nnz_qo == 0 or max_extend_len == 0 or nnz_kv == 0:
        return
    group = num_qo_heads // num_kv_heads
    acc, acc_dtype = accumulator(q.dtype)
    blocks, launch = _tiles(max_extend_len * group, head_dim, q.dtype)
    row_tiles = triton.cdiv(max_extend_len * group, blocks["BLOCK_M"])
    num_splits = _num_splits(
        bs, row_tiles, triton.cdiv(nnz_kv, bs * blocks["BLOCK_N"]), num_kv_heads, num_sms(q.device)
    )
    k_cache, cos_sin_cache = layer.k_cache, layer.cos_sin_cache
    tensors = (
        rows.qo_indptr, rows.q_positions, rows.kv_indptr, rows.kv_indices, rows.kv_positions,
        rows.num_segments, rows.segment_ends, rows.segment_offsets, cos_sin_cache,
    )  # fmt: skip
    strides = (
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1),
        rows.segment_ends.stride(0), rows.segment_offsets.stride(0), cos_sin_cache.stride(0),
    )  # fmt: skip
    constants = dict(
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=layer.kind.rotary_dim, IS_NEOX=layer.is_neox,
        **score_scales(layer.sm_scale, layer.logit_cap), ACC=acc,
        BLOCK_SEGMENTS=table_block(rows.max_segments, least=16), **blocks, **launch,
    )  # fmt: skip
    partial_lse = torch.empty(num_splits, nnz_qo, num_qo_heads, dtype=acc_dtype, device=q.device)
    _lse_kernel[(row_tiles, num_kv_heads, bs * num_splits)](
        q, k_cache, partial_lse, *tensors, nnz_qo, num_splits, *strides, **constants
    )
    lse = partial_lse.logsumexp(0)
    if layer.sinks is not None:
        lse = lse.logaddexp(layer.sinks.to(acc_dtype))
    _sum_kernel[(triton.cdiv(nnz_kv, blocks["BLOCK_N"]), bs)](
        sums, q, k_cache, lse, *tensors, *strides, NUM_KV_HEADS=num_kv_heads, **constants
    )

"""Prefill of new text over cached chunks: GQA-packed rows, visibility by position, split-KV for short tails."""

import functools

import torch
import triton
import triton.language as tl

from sgl_kernel_lazy.device import num_sms, shared_memory
from sgl_kernel_lazy.layer import Layer, check_queries
from sgl_kernel_lazy.rows import ExtendRows
from sgl_kernel_lazy.triton.common import (
    accumulator,
    block_sizes,
    check_caches,
    finish,
    jit,
    merge_splits,
    operand_size,
    score_scales,
    share_beside_sink,
    table_block,
)
from sgl_kernel_lazy.triton.extend_runs import attend_masked, attend_seen, rotated_queries, seen_bounds

MAX_SPLITS = 64
# Microseconds of an earlier kernel on an H200, whose SMs ran one program at a time: per 128 KV tokens, to begin and end
# a program and to merge, and bytes merged in one.
TILE_TIME, ITEM_TIME, MERGE_TIME, MERGE_RATE = 2.3, 5.0, 4.0, 3e6
# Bytes of a tile of keys; shared memory per program, as on Hopper, from which a third stage is used.
TILE_BYTES, DEEP_SHARED_MEMORY = 16384, 208 << 10
# For heads of 512: rows, bytes of a tile of keys, and the shared memory that such tiles need. With more rows, results
# leave no registers; with these, two programs fit on an SM of Hopper.
WIDE_BLOCK_M, WIDE_TILE_BYTES, WIDE_SHARED_MEMORY = 32, 32768, 160 << 10


@jit
def _link_extend_kernel(
    q, k_cache, v_cache, sinks, out, lse,
    qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
    num_segments, segment_ends, segment_offsets, cos_sin_cache,
    nnz_qo, num_splits, v_scale,
    stride_q_row, stride_q_head, stride_k_head, stride_v_head,
    stride_out_row, stride_out_head, stride_lse_row, stride_ends, stride_offsets, stride_position,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    STRIDE_K_SLOT: tl.constexpr, STRIDE_V_SLOT: tl.constexpr, SCALE_LOG2: tl.constexpr, CAP_SCALE: tl.constexpr,
    WINDOW: tl.constexpr, ACC: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_SEGMENTS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M packed rows (token, query head) of one request and one kv head, over one split of the request's row.

    Without SPLIT, num_splits is 1 and out and lse are the results; else out[split, token, head] (normalised) and
    lse[split, token, head] (base 2, ACC) are partial.
    WINDOW: 0 for none.
    """
    LN2: tl.constexpr = 0.6931471805599453
    kv_head = tl.program_id(1)
    b = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    qo_begin = tl.load(qo_indptr + b)
    qo_length = tl.load(qo_indptr + b + 1) - qo_begin
    # The last tile comes first: under causality it is the longest.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    if tile * BLOCK_M >= qo_length * GROUP:
        return
    row_begin = tl.load(kv_indptr + b)
    row_length = tl.load(kv_indptr + b + 1) - row_begin
    low, high = 0, row_length
    if SPLIT:
        size = tl.cdiv(tl.cdiv(row_length, num_splits), BLOCK_N) * BLOCK_N
        low = tl.minimum(split * size, row_length)
        high = tl.minimum(low + size, row_length)

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = qo_begin + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    row_mask = packed < qo_length * GROUP
    q_position = tl.load(q_positions + token, mask=row_mask, other=-1).to(tl.int32)
    newest = tl.max(q_position, 0)
    oldest = tl.min(tl.where(row_mask, q_position, 2147483647), 0)
    dim = tl.arange(0, BLOCK_D)
    q_mask = row_mask[:, None] & (dim < HEAD_DIM)[None, :]
    q_rows = q + token.to(tl.int64)[:, None] * stride_q_row + head[:, None] * stride_q_head
    offsets = segment_offsets + b * stride_offsets
    k_rows = k_cache + kv_head * stride_k_head
    v_rows = v_cache + kv_head * stride_v_head

    segment = tl.arange(0, BLOCK_SEGMENTS)
    segments = tl.load(num_segments + b)
    table = tl.load(segment_ends + b * stride_ends + segment, mask=segment < segments, other=2147483647)
    first_run = tl.sum((table <= low).to(tl.int32), 0)
    last_run = tl.minimum(tl.sum((table < high).to(tl.int32), 0), segments)
    # The text is two runs, cached and new; the new tokens close the row.
    last_run += ((last_run == segments) & (high > row_length - qo_length)).to(tl.int32)

    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    row_max = tl.full([BLOCK_M], float("-inf"), ACC)
    row_sum = tl.zeros([BLOCK_M], ACC)
    run_begin = low
    # The queries are rotated for the next run at the end of each: a loop-carried value is put in shared memory, where
    # tensor cores read it; a tile made where it is used would be loaded into registers for every block of keys.
    q_tile = rotated_queries(
        q_rows, q_mask, dim, offsets, first_run, segments, cos_sin_cache, stride_position, ROTARY_DIM, IS_NEOX, ACC
    )
    for run in range(first_run, last_run + 1):
        is_chunk = run < segments
        chunk_end = tl.load(segment_ends + b * stride_ends + run, mask=is_chunk, other=0)
        text_end = tl.where(run == segments, tl.maximum(row_length - qo_length, run_begin), row_length)
        run_end = tl.minimum(tl.where(is_chunk, chunk_end, text_end), high)
        begin, entered, full, end = seen_bounds(kv_positions + row_begin, run_begin, run_end, oldest, newest, WINDOW)
        if begin < end:
            blocks_begin = begin
            if WINDOW > 0:
                blocks_begin += tl.cdiv(tl.maximum(entered - begin, 0), BLOCK_N) * BLOCK_N
                blocks_begin = tl.minimum(blocks_begin, end)
                full = tl.maximum(full, blocks_begin)
                acc, row_max, row_sum = attend_masked(
                    q_tile, k_rows, v_rows, kv_indices + row_begin, kv_positions + row_begin, begin, blocks_begin,
                    q_position, dim, acc, row_max, row_sum,
                    STRIDE_K_SLOT, STRIDE_V_SLOT, SCALE_LOG2, CAP_SCALE, HEAD_DIM, BLOCK_N, WINDOW,
                )  # fmt: skip
            blocks_end = blocks_begin + (full - blocks_begin) // BLOCK_N * BLOCK_N
            acc, row_max, row_sum = attend_seen(
                q_tile, k_rows, v_rows, kv_indices + row_begin, blocks_begin, blocks_end,
                dim, acc, row_max, row_sum, STRIDE_K_SLOT, STRIDE_V_SLOT, SCALE_LOG2, CAP_SCALE, HEAD_DIM, BLOCK_N,
            )  # fmt: skip
            acc, row_max, row_sum = attend_masked(
                q_tile, k_rows, v_rows, kv_indices + row_begin, kv_positions + row_begin, blocks_end, end,
                q_position, dim, acc, row_max, row_sum,
                STRIDE_K_SLOT, STRIDE_V_SLOT, SCALE_LOG2, CAP_SCALE, HEAD_DIM, BLOCK_N, 0,
            )  # fmt: skip
        run_begin = run_end
        # Under an `if` the result could be the present tile, which would then hold registers all through the run. The
        # mask depends on the run, which keeps the loads behind those of the keys.
        q_tile = rotated_queries(
            q_rows, q_mask & (run < last_run), dim, offsets, run + 1, segments, cos_sin_cache, stride_position,
            ROTARY_DIM, IS_NEOX, ACC,
        )  # fmt: skip

    result, result_lse = finish(acc, row_max, row_sum)
    result *= v_scale
    if not SPLIT:
        result_lse *= LN2
        if sinks is not None:
            result *= share_beside_sink(tl.load(sinks + head, mask=row_mask, other=0.0), result_lse)[:, None]
    token = token.to(tl.int64) + split * nnz_qo
    out_rows = out + token[:, None] * stride_out_row + head[:, None] * stride_out_head
    tl.store(out_rows + dim[None, :], result.to(out.dtype.element_ty), mask=q_mask)
    if lse is not None:
        tl.store(lse + token * stride_lse_row + head, result_lse, mask=row_mask)


@jit
def _merge_kernel(
    partial_out, partial_lse, sinks, out, lse, nnz_qo, num_splits, stride_out_row, stride_out_head, stride_lse_row,
    HEAD_DIM: tl.constexpr, ACC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out[token, head] and lse[token, head] from partial rows [num_splits, nnz_qo, num_qo_heads]."""
    token, head, num_heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    result, result_lse = merge_splits(
        partial_out, partial_lse, token * num_heads + head, num_splits, nnz_qo * num_heads,
        HEAD_DIM, ACC, BLOCK_D, BLOCK_S,
    )  # fmt: skip
    if sinks is not None:
        result *= share_beside_sink(tl.load(sinks + head), result_lse)
    dim = tl.arange(0, BLOCK_D)
    row = out + token * stride_out_row + head * stride_out_head
    tl.store(row + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    if lse is not None:
        tl.store(lse + token * stride_lse_row + head, result_lse)


@functools.lru_cache(maxsize=1024)
def _plan(
    bs: int,
    nnz_qo: int,
    nnz_kv: int,
    max_extend_len: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    row_bytes: int,
    num_sms: int,
) -> tuple[int, int]:
    """(BLOCK_M, num_splits): the smallest tile that holds a short tail, and the cheapest split by a model of the time.

    nnz_kv may be an upper bound, and requests may differ in length: that only costs time.
    """
    rows = max_extend_len * (num_qo_heads // num_kv_heads)
    # Wide heads and fp32 leave no registers for 128 rows; the widest in fp32 leave no shared memory for 64.
    if rows <= 16 or row_bytes > 1024:
        block_m = 16
    elif head_dim > 256:
        block_m = WIDE_BLOCK_M
    else:
        block_m = 64 if rows <= 64 or row_bytes > 256 else 128
    programs = bs * num_kv_heads * -(-rows // block_m)
    at_once = num_sms * (2 if block_m == WIDE_BLOCK_M else 1)
    tiles = max(1, -(-nnz_kv // (bs * 128)))

    def time(num_splits: int) -> float:
        waves = -(-programs * num_splits // at_once)
        merge = MERGE_TIME + num_splits * nnz_qo * num_qo_heads * head_dim * 8 / MERGE_RATE if num_splits > 1 else 0.0
        return waves * (-(-tiles // num_splits) * TILE_TIME + ITEM_TIME) + merge

    return block_m, min(range(1, min(tiles, MAX_SPLITS) + 1), key=time)


@functools.cache
def _launch(block_m: int, head_dim: int, device: torch.device) -> dict[str, int]:
    """Warps and stages: three stages keep two tiles in flight, two stages one; unlike in link_decode.py, loading slots
    takes no stage."""
    if block_m == WIDE_BLOCK_M:
        return dict(num_warps=4, num_stages=2)
    return dict(
        num_warps=8 if block_m == 128 or head_dim > 128 else 4,
        num_stages=3 if shared_memory(device) >= DEEP_SHARED_MEMORY else 2,
    )


@functools.cache
def _tile_bytes(block_m: int, device: torch.device) -> int:
    wide = block_m == WIDE_BLOCK_M and shared_memory(device) >= WIDE_SHARED_MEMORY
    return WIDE_TILE_BYTES if wide else TILE_BYTES


def link_extend(
    q: torch.Tensor, layer: Layer, rows: ExtendRows, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """Same contract as `sgl_kernel_lazy.torch_impl.link_extend`, fp8 caches with fp16 and bf16 queries; never waits for
    the device.
    """
    check_queries(q, layer, rows, out, lse)
    check_caches(layer)
    num_qo_heads, num_kv_heads, head_dim = layer.dims
    bs, nnz_qo, nnz_kv, max_extend_len = rows.bs, rows.num_queries, rows.num_listed, rows.max_extend_len
    group = num_qo_heads // num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if nnz_qo == 0 or max_extend_len == 0:
        return out
    acc, acc_dtype = accumulator(q.dtype)
    block_m, num_splits = _plan(
        bs, nnz_qo, nnz_kv, max_extend_len, num_qo_heads, num_kv_heads, head_dim,
        head_dim * operand_size(q.dtype), num_sms(q.device),
    )  # fmt: skip
    if layer.window is not None:
        num_splits = 1  # few tiles, and next to one another
    target, target_lse = out, lse
    if num_splits > 1:
        target = torch.empty(num_splits * nnz_qo, num_qo_heads, head_dim, dtype=torch.float32, device=q.device)
        target_lse = torch.empty(num_splits * nnz_qo, num_qo_heads, dtype=acc_dtype, device=q.device)
    k_cache, v_cache, cos_sin_cache = layer.k_cache, layer.v_cache, layer.cos_sin_cache
    blocks = block_sizes(head_dim, q.dtype, _tile_bytes(block_m, q.device))
    _link_extend_kernel[(triton.cdiv(max_extend_len * group, block_m), num_kv_heads, bs * num_splits)](
        q, k_cache, v_cache, layer.sinks, target, target_lse,
        rows.qo_indptr, rows.q_positions, rows.kv_indptr, rows.kv_indices, rows.kv_positions,
        rows.num_segments, rows.segment_ends, rows.segment_offsets, cos_sin_cache,
        nnz_qo, num_splits, layer.v_scale,
        q.stride(0), q.stride(1), k_cache.stride(1), v_cache.stride(1),
        target.stride(0), target.stride(1), target_lse.stride(0) if target_lse is not None else 0,
        rows.segment_ends.stride(0), rows.segment_offsets.stride(0), cos_sin_cache.stride(0),
        GROUP=group, HEAD_DIM=head_dim, ROTARY_DIM=layer.kind.rotary_dim, IS_NEOX=layer.is_neox,
        STRIDE_K_SLOT=k_cache.stride(0), STRIDE_V_SLOT=v_cache.stride(0),
        **score_scales(layer.sm_scale, layer.logit_cap), WINDOW=layer.window or 0, ACC=acc, SPLIT=num_splits > 1,
        BLOCK_M=block_m, **blocks, BLOCK_SEGMENTS=table_block(rows.max_segments, least=16),
        **_launch(block_m, head_dim, q.device),
    )  # fmt: skip
    if num_splits > 1:
        _merge_kernel[(nnz_qo, num_qo_heads)](
            target, target_lse, layer.sinks, out, lse, nnz_qo, num_splits,
            out.stride(0), out.stride(1), lse.stride(0) if lse is not None else 0,
            HEAD_DIM=head_dim, ACC=acc, BLOCK_D=blocks["BLOCK_D"], BLOCK_S=16, num_warps=4,
        )  # fmt: skip
    return out

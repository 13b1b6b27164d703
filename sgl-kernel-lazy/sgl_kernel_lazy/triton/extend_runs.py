"""Parts of the prefill kernel: what it computes of one run of a row, whose keys are read under one rotation."""

import triton
import triton.language as tl

from sgl_kernel_lazy.triton.common import accumulate, partner_dim, rotate_back


@triton.jit
def seen_bounds(kv_positions, low, high, oldest, newest, WINDOW: tl.constexpr):
    """Bounds of the KV tokens of the run [low, high) that query rows at positions oldest .. newest can see.

    Returns (begin, entered, full, end): every row sees all of [entered, full), no row sees anything before begin or
    from end on. Positions ascend strictly, so the token i places after the first is at least i positions after it, and
    the token i places before the last at least i before: bounds that are exact without gaps.
    """
    first = tl.load(kv_positions + low, mask=low < high, other=0)
    last = tl.load(kv_positions + high - 1, mask=low < high, other=-1)
    length = high - low
    end = low + tl.minimum(tl.maximum(newest - first + 1, 0), length)
    without_gaps = last - first == length - 1
    full = low + tl.minimum(tl.maximum(tl.where(without_gaps, oldest - first + 1, 0), 0), length)
    begin, entered = low, low
    if WINDOW > 0:
        begin += tl.minimum(tl.maximum(oldest - WINDOW - last + length, 0), length)
        entered += tl.minimum(tl.maximum(newest - WINDOW + 1 - first, 0), length)
    return begin, entered, tl.where(last <= oldest, high, full), end


@triton.jit
def rotated_queries(
    q_rows, q_mask, dim, offsets, run, segments, cos_sin_cache, stride_position,
    ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The query tile rotated for a run's keys. It is loaded again for each run, to save registers."""
    offset = tl.load(offsets + run, mask=run < segments, other=0)
    q_stored = tl.load(q_rows + dim[None, :], mask=q_mask, other=0.0)
    q_partner = tl.load(q_rows + partner_dim(dim, ROTARY_DIM, IS_NEOX)[None, :], mask=q_mask, other=0.0)
    return rotate_back(q_stored, q_partner, dim, offset, cos_sin_cache, stride_position, ROTARY_DIM, IS_NEOX, ACC)


@triton.jit
def _load_rows(rows, slot, dim, within, STRIDE_SLOT: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The tile [keys, dims] of keys or values at the slots, or at those within; unmasked if all are.

    The stride is a constant, like head_dim, so that a row's address costs one instruction: all caches of a server have
    the same layout.
    """
    pointers = rows + slot.to(tl.int64)[:, None] * STRIDE_SLOT + dim[None, :]
    if within is None and dim.shape[0] == HEAD_DIM:
        tile = tl.load(pointers)
    else:
        mask = (dim < HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=mask if within is None else mask & within[:, None], other=0.0)
    return tile


@triton.jit
def attend_seen(
    q_tile, k_rows, v_rows, kv_indices, begin, end, dim, acc, row_max, row_sum,
    STRIDE_K_SLOT: tl.constexpr, STRIDE_V_SLOT: tl.constexpr, SCALE_LOG2: tl.constexpr, CAP_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax state after the KV tokens [begin, end), whole blocks that every row sees."""
    column = tl.arange(0, BLOCK_N)
    # Slots are loaded a block ahead and wait in registers, as int32: a pipelined load would pass them through shared
    # memory, at the price of copies, a barrier and stages.
    ahead = tl.load(kv_indices + begin + column, mask=begin + column < end, other=0).to(tl.int32)
    for start in tl.range(begin, end, BLOCK_N):
        slot = ahead
        ahead = tl.load(kv_indices + start + BLOCK_N + column, mask=start + BLOCK_N < end, other=0).to(tl.int32)
        k = _load_rows(k_rows, slot, dim, None, STRIDE_K_SLOT, HEAD_DIM)
        v = _load_rows(v_rows, slot, dim, None, STRIDE_V_SLOT, HEAD_DIM)
        acc, row_max, row_sum = accumulate(q_tile, k, v, None, acc, row_max, row_sum, SCALE_LOG2, CAP_SCALE)
    return acc, row_max, row_sum


@triton.jit
def attend_masked(
    q_tile, k_rows, v_rows, kv_indices, kv_positions, begin, end, q_position, dim, acc, row_max, row_sum,
    STRIDE_K_SLOT: tl.constexpr, STRIDE_V_SLOT: tl.constexpr, SCALE_LOG2: tl.constexpr, CAP_SCALE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The softmax state after what each row sees of the KV tokens [begin, end): few blocks, which are not pipelined.

    WINDOW: 0 if it excludes none of them.
    """
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        place = start + tl.arange(0, BLOCK_N)
        within = place < end
        slot = tl.load(kv_indices + place, mask=within, other=0)
        kv_position = tl.load(kv_positions + place, mask=within, other=2147483647)
        visible = kv_position[None, :] <= q_position[:, None]
        if WINDOW > 0:
            visible = visible & (kv_position[None, :] > q_position[:, None] - WINDOW)
        k = _load_rows(k_rows, slot, dim, within, STRIDE_K_SLOT, HEAD_DIM)
        v = _load_rows(v_rows, slot, dim, within, STRIDE_V_SLOT, HEAD_DIM)
        acc, row_max, row_sum = accumulate(q_tile, k, v, visible, acc, row_max, row_sum, SCALE_LOG2, CAP_SCALE)
    return acc, row_max, row_sum

"""Device functions shared by the ops: rotating a query tile, online softmax, merging partial results."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.validation import FP8

LOG2E = 1.4426950408889634
# Arguments whose value or alignment changes between batches; specializing on them would compile useless variants.
VARYING = ("bs", "nnz_qo", "num_splits", "num_spans", "stride_ends", "stride_offsets", "first")
UNALIGNED = (
    "sums", "qo_indptr", "q_positions", "kv_indptr", "kv_indices", "kv_positions",
    "num_segments", "segment_ends", "segment_offsets",
)  # fmt: skip


def accumulator(dtype: torch.dtype) -> tuple[tl.dtype, torch.dtype]:
    """ACC, the type of scores, weights and sums, and its PyTorch dtype: wider than the inputs', so that only results
    are rounded to the latter.
    """
    return (tl.float64, torch.float64) if dtype == torch.float32 else (tl.float32, torch.float32)


def kv_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of caches for queries in `dtype`: Triton does not widen fp8 to ACC for float32."""
    return (dtype,) if dtype == torch.float32 else (dtype, *FP8)


def check_caches(layer: Layer) -> None:
    """Raise ValueError if the caches of a layer have a dtype that Triton does not read for its queries."""
    if (kv_dtype := layer.k_cache.dtype) not in kv_dtypes(layer.dtype):
        raise ValueError(f"k_cache: expected dtype {layer.dtype}, got {kv_dtype}")


def operand_size(dtype: torch.dtype) -> int:
    """Bytes per element of the multiplied tiles: float32 is widened to ACC, other inputs are not."""
    return 8 if dtype == torch.float32 else dtype.itemsize


@functools.cache
def block_sizes(head_dim: int, dtype: torch.dtype, tile_bytes: int) -> dict[str, int]:
    """BLOCK_D, and the BLOCK_N (16 to 128) that makes a tile of keys tile_bytes large."""
    block_d = triton.next_power_of_2(head_dim)
    return dict(BLOCK_D=block_d, BLOCK_N=min(128, max(16, tile_bytes // (block_d * operand_size(dtype)))))


@functools.cache
def table_block(length: int, least: int) -> int:
    """A power of two that holds `length` table entries, at least `least`, so that few variants are compiled."""
    return max(least, triton.next_power_of_2(max(1, length)))


def jit(kernel: Callable) -> Any:
    """triton.jit for a kernel, without specialization on arguments that vary between batches."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    return triton.jit(
        do_not_specialize=[name for name in names if name in VARYING],
        do_not_specialize_on_alignment=[name for name in names if name in UNALIGNED],
    )(kernel)


@triton.jit
def partner_dim(dim, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr):
    """The dimension that each dimension is paired with; those beyond ROTARY_DIM are unpaired."""
    if IS_NEOX:
        partner = tl.where(dim < ROTARY_DIM // 2, dim + ROTARY_DIM // 2, dim - ROTARY_DIM // 2)
    else:
        partner = dim ^ 1
    return tl.where(dim < ROTARY_DIM, partner, dim)


@triton.jit
def place_in_pairs(dim, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr):
    """The frequency that each dimension below ROTARY_DIM is rotated with, and whether it begins its pair."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    if IS_NEOX:
        frequency = tl.where(dim < HALF, dim, dim - HALF)
        begins_pair = dim < HALF
    else:
        frequency = dim // 2
        begins_pair = dim % 2 == 0
    return frequency, begins_pair


@triton.jit
def rotate_back(
    q, q_partner, dim, offset, cos_sin_cache, stride_position,
    ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """R(-offset) q for a tile [rows, dims]: q cos + partner sin where a pair begins, q cos - partner sin where it ends.

    Loading the partners as a second tile keeps the rotation free of shuffles. The result is what `accumulate`
    multiplies with: in q's dtype, or in ACC where q is float32.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    frequency, begins_pair = place_in_pairs(dim, ROTARY_DIM, IS_NEOX)
    row = cos_sin_cache + offset.to(tl.int64) * stride_position
    cos = tl.load(row + frequency, mask=dim < ROTARY_DIM, other=1.0)
    sin = tl.load(row + HALF + frequency, mask=dim < ROTARY_DIM, other=0.0)
    sin = tl.where(begins_pair, sin, -sin)
    rotated = q.to(ACC) * cos[None, :] + q_partner.to(ACC) * sin[None, :]
    return rotated if q.dtype == tl.float32 else rotated.to(q.dtype)


def score_scales(sm_scale: float, logit_cap: float | None) -> dict[str, float]:
    """CAP_SCALE, what scores are multiplied by before tanh, 0 for none; SCALE_LOG2, what is left to multiply by."""
    if logit_cap is None:
        return dict(CAP_SCALE=0.0, SCALE_LOG2=sm_scale * LOG2E)
    return dict(CAP_SCALE=sm_scale / logit_cap, SCALE_LOG2=logit_cap * LOG2E)


@triton.jit
def capped(scores, CAP_SCALE: tl.constexpr):
    """tanh(scores CAP_SCALE); tl has no function as accurate as the sums."""
    if CAP_SCALE > 0:
        TWICE_LOG2E: tl.constexpr = 2.8853900817779268
        scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (CAP_SCALE * TWICE_LOG2E)))
    return scores


@triton.jit
def softmax_step(scores, row_max, SCALE_LOG2: tl.constexpr):
    """One online-softmax step, in base 2: the weights of scores [rows, keys], -inf where a row does not see a key.

    Returns (weights, decay, new_max): earlier sums, relative to row_max, must be multiplied by decay.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * SCALE_LOG2)
    # A row that has seen nothing keeps the maximum -inf; shifting it by 0 instead keeps its weights exp2(-inf) = 0.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    return tl.exp2(scores * SCALE_LOG2 - shift[:, None]), tl.exp2(row_max - shift), new_max


@triton.jit
def accumulate(q, k, v, visible, acc, row_max, row_sum, SCALE_LOG2: tl.constexpr, CAP_SCALE: tl.constexpr):
    """The softmax state (acc, row_max, row_sum), in base 2, after also seeing keys k and values v.

    visible: bool, broadcastable to [rows, keys], or None where every row sees every key.
    """
    scores = capped(tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee", out_dtype=acc.dtype), CAP_SCALE)
    if visible is not None:
        scores = tl.where(visible, scores, float("-inf"))
    weights, decay, new_max = softmax_step(scores, row_max, SCALE_LOG2)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee", out_dtype=acc.dtype)
    return acc, new_max, row_sum * decay + tl.sum(weights, 1)


@triton.jit
def finish(acc, row_max, row_sum):
    """The normalized output and its base-2 lse; zeros and -inf for a row that saw nothing."""
    seen = row_sum > 0
    total = tl.where(seen, row_sum, 1.0)
    return acc / total[:, None], tl.where(seen, row_max + tl.log2(total), float("-inf"))


@triton.jit
def share_beside_sink(sink, lse):
    """exp(lse) / (exp(lse) + exp(sink)), by which a sink scales an output row of its head."""
    return 1.0 / (1.0 + tl.exp(sink.to(lse.dtype) - lse))


@triton.jit
def merge_step(part, lse, acc, row_max, row_sum):
    """The state (acc, row_max, row_sum) after adding partial rows [rows, dims], normalised, and their base-2 lse."""
    new_max = tl.maximum(row_max, tl.max(lse, 0))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(lse - shift)
    decay = tl.exp2(row_max - shift)
    acc = acc * decay + tl.sum(part.to(acc.dtype) * weights[:, None], 0)
    return acc, new_max, row_sum * decay + tl.sum(weights, 0)


@triton.jit
def merged(acc, row_max, row_sum):
    """The output row of a merge and its natural-log lse; zeros and -inf where no partial row saw anything."""
    LN2: tl.constexpr = 0.6931471805599453
    total = tl.where(row_sum > 0, row_sum, 1.0)
    return acc / total, tl.where(row_sum > 0, (row_max + tl.log2(total)) * LN2, float("-inf"))


@triton.jit
def merge_splits(
    partial_out, partial_lse, first, count, stride, head_dim,
    ACC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the partial rows first, first + stride, ... (count of them) into one output row and its natural-log lse.

    partial_out: [rows, head_dim] fp32, normalised.  partial_lse: [rows] ACC, base 2. All of these rows have been
    written. BLOCK_S of them are taken at a time.
    """
    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], ACC)
    row_max = tl.full([], float("-inf"), ACC)
    row_sum = tl.zeros([], ACC)
    for start in range(0, count, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        row = first.to(tl.int64) + split * stride
        lse = tl.load(partial_lse + row, mask=split < count, other=float("-inf"))
        mask = (split < count)[:, None] & (dim < head_dim)[None, :]
        part = tl.load(partial_out + row[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
        acc, row_max, row_sum = merge_step(part, lse, acc, row_max, row_sum)
    return merged(acc, row_max, row_sum)

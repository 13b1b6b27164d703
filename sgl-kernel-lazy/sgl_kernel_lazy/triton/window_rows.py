"""The KV tokens of each row within a window in decode, with its segments: one program per row, in one launch."""

import torch
import triton.language as tl

from sgl_kernel_lazy.triton.common import jit, table_block
from sgl_kernel_lazy.validation import check_window_inputs


@jit
def _window_rows_kernel(
    kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets,
    req_to_token, all_num_segments, all_offsets, tail_ends, tail_indices, tail_positions, rows, seq_lens, window_slots,
    first, window, max_tail, stride_row, stride_count, stride_all_offsets, stride_tail_ends, stride_indices,
    stride_positions, stride_ends, stride_offsets,
    NUM_QUERIES: tl.constexpr, HAS_POOL: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start = tl.zeros([], tl.int32)
    for begin in range(0, b, BLOCK_B):
        before = begin + tl.arange(0, BLOCK_B)
        lens = tl.load(seq_lens + before // NUM_QUERIES, mask=before < b, other=0).to(tl.int32)
        lens = tl.minimum(tl.maximum(lens + first + before % NUM_QUERIES, 1), window)
        start += tl.sum(tl.where(before < b, lens, 0), 0)
    seq_len = tl.maximum(tl.load(seq_lens + b // NUM_QUERIES).to(tl.int32) + first + b % NUM_QUERIES, 1)
    length = tl.minimum(seq_len, window)
    tl.store(kv_indptr + b + 1, start + length)

    row = tl.load(rows + b // NUM_QUERIES)
    slots = req_to_token + row * stride_row
    entry = tl.arange(0, BLOCK_T)
    position = tl.load(tail_positions + row * stride_positions + entry, mask=entry < max_tail, other=-2147483648)
    seen = position >= seq_len - window
    rank = tl.cumsum(seen.to(tl.int32), 0)
    # In rows that pad a batch, the tail of an earlier request may be longer than the row.
    seen &= rank <= length
    rank = tl.minimum(rank, length)
    index = tl.load(tail_indices + row * stride_indices + entry, mask=seen, other=0)
    of_tail = tl.load(slots + index, mask=seen, other=0)
    if HAS_POOL:
        of_tail = tl.load(window_slots + of_tail, mask=seen, other=0).to(tl.int32)
    tl.store(kv_indices + start + rank - 1, of_tail, mask=seen)
    for begin in range(tl.max(rank, 0), length, BLOCK_N):
        place = begin + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + seq_len - length + place, mask=place < length, other=0)
        if HAS_POOL:
            slot = tl.load(window_slots + slot, mask=place < length, other=0).to(tl.int32)
        tl.store(kv_indices + start + place, slot, mask=place < length)

    count = tl.load(all_num_segments + row * stride_count)
    tl.store(num_segments + b, count)
    for segment in range(0, count):
        end = tl.load(tail_ends + row * stride_tail_ends + segment)
        tl.store(segment_ends + b * stride_ends + segment, tl.max(tl.where(entry < end, rank, 0), 0))
    for begin in range(0, count, BLOCK_S):
        part = begin + tl.arange(0, BLOCK_S)
        offset = tl.load(all_offsets + row * stride_all_offsets + part, mask=part < count)
        tl.store(segment_offsets + b * stride_offsets + part, offset, mask=part < count)


def window_rows(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_offsets: torch.Tensor,
    req_to_token: torch.Tensor,
    all_num_segments: torch.Tensor,
    all_offsets: torch.Tensor,
    tail_ends: torch.Tensor,
    tail_indices: torch.Tensor,
    tail_positions: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    window_slots: torch.Tensor | None = None,
    *,
    window: int,
    first: int,
    num_queries: int,
) -> None:
    """See `sgl_kernel_lazy.torch_impl.window_rows`; without device synchronization."""
    check_window_inputs(
        kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, req_to_token, all_num_segments, all_offsets,
        tail_ends, tail_indices, tail_positions, rows, seq_lens, window_slots, window, num_queries,
    )  # fmt: skip
    if not (total := len(num_segments)):
        return
    max_tail = tail_indices.shape[1]
    _window_rows_kernel[(total,)](
        kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets,
        req_to_token, all_num_segments, all_offsets, tail_ends, tail_indices, tail_positions, rows, seq_lens,
        rows if window_slots is None else window_slots,
        first, window, max_tail, req_to_token.stride(0), all_num_segments.stride(0), all_offsets.stride(0),
        tail_ends.stride(0), tail_indices.stride(0), tail_positions.stride(0), segment_ends.stride(0),
        segment_offsets.stride(0),
        NUM_QUERIES=num_queries, HAS_POOL=window_slots is not None,
        BLOCK_B=256, BLOCK_T=table_block(max_tail, least=16), BLOCK_N=128, BLOCK_S=128, num_warps=4,
    )  # fmt: skip

"""The KV tokens of each row within a window in decode, one program per row."""

import torch
import triton.language as tl

from sgl_kernel_lazy.triton.common import jit, table_block
from sgl_kernel_lazy.validation import check_window_inputs


@jit
def _window_rows_kernel(
    kv_indptr, kv_indices, segment_ends, num_segments, req_to_token, rows, seq_lens,
    tail_ends, tail_indices, tail_positions,
    bs, window, max_tail, stride_ends, stride_row, stride_tail_ends, stride_indices, stride_positions,
    BLOCK_BS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    request = tl.arange(0, BLOCK_BS)
    lens = tl.minimum(tl.load(seq_lens + request, mask=request < bs, other=0).to(tl.int32), window)
    start = tl.sum(tl.where(request < b, lens, 0), 0)
    seq_len = tl.load(seq_lens + b).to(tl.int32)
    length = tl.minimum(seq_len, window)
    tl.store(kv_indptr + b + 1, start + length)

    row = tl.load(rows + b)
    slots = req_to_token + row * stride_row
    entry = tl.arange(0, BLOCK_T)
    position = tl.load(tail_positions + row * stride_positions + entry, mask=entry < max_tail, other=-2147483648)
    seen = position >= seq_len - window
    # In rows that pad a batch, the tail of an earlier request may be longer than the row.
    rank = tl.minimum(tl.cumsum(seen.to(tl.int32), 0), length)
    index = tl.load(tail_indices + row * stride_indices + entry, mask=seen, other=0)
    tl.store(kv_indices + start + rank - 1, tl.load(slots + index, mask=seen, other=0), mask=seen)
    for first in range(tl.max(rank, 0), length, BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + seq_len - length + place, mask=place < length, other=0)
        tl.store(kv_indices + start + place, slot, mask=place < length)
    for segment in range(0, tl.load(num_segments + b)):
        end = tl.load(tail_ends + row * stride_tail_ends + segment)
        tl.store(segment_ends + b * stride_ends + segment, tl.max(tl.where(entry < end, rank, 0), 0))


def window_rows(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    segment_ends: torch.Tensor,
    num_segments: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_ends: torch.Tensor,
    tail_indices: torch.Tensor,
    tail_positions: torch.Tensor,
    *,
    window: int,
) -> None:
    """See `sgl_kernel_lazy.torch_impl.window_rows`; without device synchronization."""
    check_window_inputs(
        kv_indptr, kv_indices, segment_ends, num_segments, req_to_token, rows, seq_lens, tail_ends, tail_indices,
        tail_positions, window,
    )  # fmt: skip
    if not len(rows):
        return
    max_tail = tail_indices.shape[1]
    _window_rows_kernel[(len(rows),)](
        kv_indptr, kv_indices, segment_ends, num_segments, req_to_token, rows, seq_lens,
        tail_ends, tail_indices, tail_positions,
        len(rows), window, max_tail, segment_ends.stride(0), req_to_token.stride(0), tail_ends.stride(0),
        tail_indices.stride(0), tail_positions.stride(0),
        BLOCK_BS=table_block(len(rows), least=128), BLOCK_T=table_block(max_tail, least=16), BLOCK_N=128, num_warps=4,
    )  # fmt: skip

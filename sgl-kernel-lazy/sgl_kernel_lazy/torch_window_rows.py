"""Rows of layers with a window, in plain PyTorch."""

import torch

from sgl_kernel_lazy.validation import check_window_inputs


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
    """Write the rows of a batch for `link_decode` in a layer with a window: the tokens that each query sees within it.

    A row lists tokens in any order, and a query's window contains the last `window` positions. The row's tail consists
    of the tokens that a window may contain and that are in segments or whose index differs from their position. For
    queries see `whole_rows`.

    kv_indptr: [bs * num_queries + 1] int32, of which the first is 0; kv_indices: [>= kv_indptr[-1]] int32, the tail
        first in each row; num_segments: [bs * num_queries] int32; segment_ends, segment_offsets: [bs * num_queries,
        max_segments] int32, of each row as many as it has segments. Written.
    req_to_token: [num_rows, width] int32, the slot of each token of a row.
    all_num_segments: [num_rows] int32, with any stride; all_offsets: [num_rows, max_segments] int32.
    tail_indices, tail_positions: [num_rows, max_tail] int32, the indices of the tail's tokens in the row, ascending,
        and their positions, at least -2**31 + window; entries with a lower position are ignored.
    tail_ends: [num_rows, max_segments] int32, the end of each segment among the entries of the tail.
    rows: [bs] int64, of these tables.
    seq_lens: [bs] int32 or int64; with `first`, tokens of the row that the first query sees, of which its own is the
        last, in order and in position.
    window_slots: [num_slots] int64, of each slot that to list in its place; None for the slot itself.
    first: how many tokens more than `seq_lens` the first query of a request sees; at least one in any case.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """
    check_window_inputs(
        kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, req_to_token, all_num_segments, all_offsets,
        tail_ends, tail_indices, tail_positions, rows, seq_lens, window_slots, window, num_queries,
    )  # fmt: skip
    lens = (seq_lens[:, None] + torch.arange(first, first + num_queries, device=rows.device)).clamp(min=1).flatten()
    row_of = rows.repeat_interleave(num_queries)
    num_segments.copy_(all_num_segments[row_of])
    for b, (row, seq_len, count) in enumerate(zip(row_of.tolist(), lens.tolist(), num_segments.tolist(), strict=True)):
        begin, length = int(kv_indptr[b]), min(seq_len, window)
        seen = tail_positions[row] >= seq_len - window
        # In rows that pad a batch, the tail of an earlier request may be longer than the row.
        tail = tail_indices[row, seen][:length]
        behind = torch.arange(seq_len - length + len(tail), seq_len)
        slots = req_to_token[row, torch.cat([tail, behind.to(tail)])]
        kv_indices[begin : begin + length] = slots if window_slots is None else window_slots[slots]
        kv_indptr[b + 1] = begin + length
        before = torch.cat([torch.zeros_like(rows[:1]), seen.cumsum(0)]).clamp(max=length)
        segment_ends[b, :count] = before[tail_ends[row, :count]]
        segment_offsets[b, :count] = all_offsets[row, :count]

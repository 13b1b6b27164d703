"""Rows of layers with a window, in plain PyTorch."""

import torch

from sgl_kernel_lazy.validation import check_window_inputs


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
    """Write the rows of a batch for `link_decode` in a layer with a window: the tokens of each row within it.

    A row lists tokens in any order, and its window contains the last `window` positions. Its tail consists of the
    tokens that a window may contain and that are in segments or whose index differs from their position.

    kv_indptr: [bs + 1] int32, of which the first is 0; kv_indices: [>= bs * window] int32; segment_ends: [bs,
        max_segments] int32. Written; the tail comes first in each row.
    num_segments: [bs] int32; no more segments than these are written.  rows: [bs] int64, of the following tables.
    seq_lens: [bs] int32 or int64, tokens of each row. The query's own is the last, in order and in position.
    req_to_token: [num_rows, width] int32, the slot of each token of a row.
    tail_indices, tail_positions: [num_rows, max_tail] int32, the indices of the tail's tokens in the row, ascending,
        and their positions, at least -2**31 + window; entries with a lower position are ignored.
    tail_ends: [num_rows, max_segments] int32, the end of each segment among the entries of the tail.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """
    check_window_inputs(
        kv_indptr, kv_indices, segment_ends, num_segments, req_to_token, rows, seq_lens, tail_ends, tail_indices,
        tail_positions, window,
    )  # fmt: skip
    for b, (row, seq_len, count) in enumerate(
        zip(rows.tolist(), seq_lens.tolist(), num_segments.tolist(), strict=True)
    ):
        begin, length = int(kv_indptr[b]), min(seq_len, window)
        seen = tail_positions[row] >= seq_len - window
        # In rows that pad a batch, the tail of an earlier request may be longer than the row.
        tail = tail_indices[row, seen][:length]
        behind = torch.arange(seq_len - length + len(tail), seq_len)
        kv_indices[begin : begin + length] = req_to_token[row, torch.cat([tail, behind.to(tail)])]
        kv_indptr[b + 1] = begin + length
        before = torch.cat([torch.zeros_like(rows[:1]), seen.cumsum(0)]).clamp(max=length)
        segment_ends[b, :count] = before[tail_ends[row, :count]]

"""Rows of layers without a window, in plain PyTorch."""

import torch

from sgl_kernel_lazy.validation import check_whole_inputs


def whole_rows(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_ids: torch.Tensor,
    req_to_token: torch.Tensor,
    all_num_segments: torch.Tensor,
    all_ends: torch.Tensor,
    all_offsets: torch.Tensor,
    all_ids: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    first: int,
    num_queries: int,
) -> None:
    """Write the rows of a batch for `link_decode` in a layer without a window: what each query sees.

    A request may have several queries, one for each token of a chain. Each is a row of its own, one token longer than
    that before it; the rows of a request follow one another.

    kv_indptr: [bs * num_queries + 1] int32, of which the first is 0; kv_indices: [>= kv_indptr[-1]] int32;
        num_segments: [bs * num_queries] int32; segment_ends, segment_offsets, segment_ids: [bs * num_queries,
        max_segments] int32, of each row as many as it has segments. Written.
    req_to_token: [num_rows, width] int32, the slot of each token of a row.
    all_num_segments: [num_rows] int32, with any stride; all_ends, all_offsets, all_ids: [num_rows, max_segments] int32,
        the segments of each row.
    rows: [bs] int64, of these tables.  seq_lens: [bs] int32 or int64.
    first: how many tokens more than `seq_lens` the first query of a request sees; at least one in any case, since a
        request that pads a batch has one.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """
    check_whole_inputs(
        kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids, req_to_token,
        all_num_segments, all_ends, all_offsets, all_ids, rows, seq_lens, num_queries,
    )  # fmt: skip
    lens = (seq_lens[:, None] + torch.arange(first, first + num_queries, device=rows.device)).clamp(min=1).flatten()
    row_of = rows.repeat_interleave(num_queries)
    kv_indptr[1:] = lens.cumsum(0)
    num_segments.copy_(all_num_segments[row_of])
    for b, (row, length, count) in enumerate(zip(row_of.tolist(), lens.tolist(), num_segments.tolist(), strict=True)):
        kv_indices[kv_indptr[b] : kv_indptr[b + 1]] = req_to_token[row, :length]
        segment_ends[b, :count] = all_ends[row, :count]
        segment_offsets[b, :count] = all_offsets[row, :count]
        segment_ids[b, :count] = all_ids[row, :count]

"""Rows of layers with a window, in plain PyTorch."""

import torch

from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, WindowTables, check_listing


def window_rows(rows: Rows, tables: WindowTables, queries: Queries) -> None:
    """Write the rows of a batch for `link_decode` in a layer with a window: the tokens that each query sees within it.

    A row lists tokens in any order, those of its tail first. What a query sees behind the tail, up to its own token, is
    in order and in position.

    rows: one for each query, without `segment_ids`; written, of each as many segments as it has. Its `kv_indptr` begins
        with 0 already.
    Raises ValueError if they do not fit the others.
    """
    check_listing(rows, tables, queries)
    lens, window, window_slots = queries.seen(queries.seq_lens), tables.window, tables.window_slots
    row_of = queries.places.repeat_interleave(queries.num_queries)
    rows.num_segments.copy_(tables.num_segments[row_of])
    counts = rows.num_segments.tolist()
    for b, (row, seq_len, count) in enumerate(zip(row_of.tolist(), lens.tolist(), counts, strict=True)):
        begin, length = int(rows.kv_indptr[b]), min(seq_len, window)
        seen = tables.tail_positions[row] >= seq_len - window
        # In rows that pad a batch, the tail of an earlier request may be longer than the row.
        tail = tables.tail_indices[row, seen][:length]
        behind = torch.arange(seq_len - length + len(tail), seq_len)
        slots = tables.req_to_token[row, torch.cat([tail, behind.to(tail)])]
        rows.kv_indices[begin : begin + length] = slots if window_slots is None else window_slots[slots]
        rows.kv_indptr[b + 1] = begin + length
        before = torch.cat([torch.zeros_like(row_of[:1]), seen.cumsum(0)]).clamp(max=length)
        rows.segment_ends[b, :count] = before[tables.tail_ends[row, :count]]
        rows.segment_offsets[b, :count] = tables.segment_offsets[row, :count]
    rows.check_contents()

"""Rows of layers without a window, in plain PyTorch."""

from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, RowTables, check_listing


def whole_rows(rows: Rows, tables: RowTables, queries: Queries) -> None:
    """Write the rows of a batch for `link_decode` in a layer without a window: what each query sees.

    rows: one for each query, with `segment_ids`; written, of each as many segments as it has. Its `kv_indptr` begins
        with 0 already.
    Raises ValueError if they do not fit the others.
    """
    check_listing(rows, tables, queries)
    assert rows.segment_ids is not None
    lens = queries.seen(queries.seq_lens)
    row_of = queries.places.repeat_interleave(queries.num_queries)
    rows.kv_indptr[1:] = lens.cumsum(0)
    rows.num_segments.copy_(tables.num_segments[row_of])
    counts = rows.num_segments.tolist()
    for b, (row, length, count) in enumerate(zip(row_of.tolist(), lens.tolist(), counts, strict=True)):
        rows.kv_indices[rows.kv_indptr[b] : rows.kv_indptr[b + 1]] = tables.req_to_token[row, :length]
        rows.segment_ends[b, :count] = tables.segment_ends[row, :count]
        rows.segment_offsets[b, :count] = tables.segment_offsets[row, :count]
        rows.segment_ids[b, :count] = tables.segment_ids[row, :count]
    rows.check_contents()

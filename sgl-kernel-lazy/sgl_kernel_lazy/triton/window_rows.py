"""The KV tokens of each row within a window in decode, with its segments: one program per row, in one launch."""

import triton.language as tl

from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, WindowTables, check_listing
from sgl_kernel_lazy.triton.common import jit, table_block


@jit
def _window_rows_kernel(
    kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets,
    req_to_token, all_num_segments, all_offsets, tail_ends, tail_indices, tail_positions,
    places, seq_lens, window_slots, first, window, max_tail,
    stride_row, stride_count, stride_all_offsets, stride_tail_ends, stride_indices, stride_positions,
    stride_ends, stride_offsets,
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

    row = tl.load(places + b // NUM_QUERIES)
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


def window_rows(rows: Rows, tables: WindowTables, queries: Queries) -> None:
    """See `sgl_kernel_lazy.torch_impl.window_rows`; without device synchronization."""
    check_listing(rows, tables, queries)
    if not (total := rows.bs):
        return
    max_tail, window_slots = tables.tail_indices.shape[1], tables.window_slots
    _window_rows_kernel[(total,)](
        rows.kv_indptr, rows.kv_indices, rows.num_segments, rows.segment_ends, rows.segment_offsets,
        tables.req_to_token, tables.num_segments, tables.segment_offsets, tables.tail_ends, tables.tail_indices,
        tables.tail_positions, queries.places, queries.seq_lens,
        queries.places if window_slots is None else window_slots,
        queries.first, tables.window, max_tail, tables.req_to_token.stride(0), tables.num_segments.stride(0),
        tables.segment_offsets.stride(0), tables.tail_ends.stride(0), tables.tail_indices.stride(0),
        tables.tail_positions.stride(0), rows.segment_ends.stride(0), rows.segment_offsets.stride(0),
        NUM_QUERIES=queries.num_queries, HAS_POOL=window_slots is not None,
        BLOCK_B=256, BLOCK_T=table_block(max_tail, least=16), BLOCK_N=128, BLOCK_S=128, num_warps=4,
    )  # fmt: skip
    rows.check_contents()

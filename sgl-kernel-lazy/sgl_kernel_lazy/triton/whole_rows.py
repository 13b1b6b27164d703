"""All KV tokens of each row in decode, with its segments: a few programs per row, in one launch."""

import triton.language as tl

from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, RowTables, check_listing
from sgl_kernel_lazy.triton.common import jit

# Programs of a launch, at least; those of a row share its tokens. So few rows are as quick as many.
PROGRAMS, LEAST_PER_ROW = 256, 4


@jit
def _whole_rows_kernel(
    kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids,
    req_to_token, all_num_segments, all_ends, all_offsets, all_ids, places, seq_lens,
    first, stride_row, stride_count, stride_all_ends, stride_all_offsets, stride_all_ids,
    stride_ends, stride_offsets, stride_ids,
    NUM_QUERIES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    start = tl.zeros([], tl.int32)
    for begin in range(0, b, BLOCK_B):
        before = begin + tl.arange(0, BLOCK_B)
        lens = tl.load(seq_lens + before // NUM_QUERIES, mask=before < b, other=0).to(tl.int32)
        lens = tl.maximum(lens + first + before % NUM_QUERIES, 1)
        start += tl.sum(tl.where(before < b, lens, 0), 0)
    length = tl.maximum(tl.load(seq_lens + b // NUM_QUERIES).to(tl.int32) + first + b % NUM_QUERIES, 1)

    row = tl.load(places + b // NUM_QUERIES)
    for begin in range(tl.program_id(1) * BLOCK_N, length, tl.num_programs(1) * BLOCK_N):
        token = begin + tl.arange(0, BLOCK_N)
        slot = tl.load(req_to_token + row * stride_row + token, mask=token < length)
        tl.store(kv_indices + start + token, slot, mask=token < length)

    if tl.program_id(1) == 0:
        tl.store(kv_indptr + b + 1, start + length)
        count = tl.load(all_num_segments + row * stride_count)
        tl.store(num_segments + b, count)
        for begin in range(0, count, BLOCK_S):
            segment = begin + tl.arange(0, BLOCK_S)
            known = segment < count
            end = tl.load(all_ends + row * stride_all_ends + segment, mask=known)
            tl.store(segment_ends + b * stride_ends + segment, end, mask=known)
            offset = tl.load(all_offsets + row * stride_all_offsets + segment, mask=known)
            tl.store(segment_offsets + b * stride_offsets + segment, offset, mask=known)
            name = tl.load(all_ids + row * stride_all_ids + segment, mask=known)
            tl.store(segment_ids + b * stride_ids + segment, name, mask=known)


def whole_rows(rows: Rows, tables: RowTables, queries: Queries) -> None:
    """See `sgl_kernel_lazy.torch_impl.whole_rows`; without device synchronization."""
    check_listing(rows, tables, queries)
    assert rows.segment_ids is not None
    if not (total := rows.bs):
        return
    _whole_rows_kernel[(total, max(LEAST_PER_ROW, PROGRAMS // total))](
        rows.kv_indptr, rows.kv_indices, rows.num_segments, rows.segment_ends, rows.segment_offsets, rows.segment_ids,
        tables.req_to_token, tables.num_segments, tables.segment_ends, tables.segment_offsets, tables.segment_ids,
        queries.places, queries.seq_lens, queries.first, tables.req_to_token.stride(0), tables.num_segments.stride(0),
        tables.segment_ends.stride(0), tables.segment_offsets.stride(0), tables.segment_ids.stride(0),
        rows.segment_ends.stride(0), rows.segment_offsets.stride(0), rows.segment_ids.stride(0),
        NUM_QUERIES=queries.num_queries, BLOCK_B=256, BLOCK_N=1024, BLOCK_S=128, num_warps=4,
    )  # fmt: skip
    rows.check_contents()

"""whole_rows: the tokens that each query of a batch sees, in order, and the segments of its request."""

import dataclasses
import random

import pytest
import torch
from ragged import DEVICE, GARBAGE

from sgl_kernel_lazy import get_implementation
from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, RowTables

NUM_ROWS, MAX_SEGMENTS = 300, 140


def arguments(rng, bs, width, index_dtype, first, num_queries):
    """All arguments, the tables filled, what is written full of garbage; and the row and length of each query."""

    def ints(*shape):
        return torch.tensor([rng.randrange(10**6) for _ in range(torch.Size(shape).numel())], dtype=torch.int32).view(
            shape
        )

    counts = torch.tensor([rng.choice([0, 1, 3, MAX_SEGMENTS]) for _ in range(NUM_ROWS)], dtype=torch.int32)
    ends, offsets = ints(NUM_ROWS, MAX_SEGMENTS).sort(1).values, ints(NUM_ROWS, MAX_SEGMENTS)
    ids = torch.arange(ends.numel(), dtype=torch.int32).view_as(ends)
    # As the tables of a server are, columns of one record.
    records = torch.cat([counts[:, None], ends, offsets, ids], dim=1)
    ends, offsets, ids = records[:, 1:].split(MAX_SEGMENTS, dim=1)
    places = rng.sample(range(NUM_ROWS), bs)
    longest = width - num_queries - 2
    seq_lens = [rng.choice([1, 2, rng.randint(1, longest), longest]) for _ in places]
    seen = [(row, max(n + first + i, 1)) for row, n in zip(places, seq_lens, strict=True) for i in range(num_queries)]
    tables = dict(
        req_to_token=ints(NUM_ROWS, width), num_segments=records[:, 0], segment_ends=ends, segment_offsets=offsets,
        segment_ids=ids,
    )  # fmt: skip
    rows = Rows.allocate(bs * num_queries, sum(n for _, n in seen) + 3, MAX_SEGMENTS, DEVICE)
    for tensor in (rows.kv_indptr[1:], rows.kv_indices, rows.num_segments, rows.segment_ends, rows.segment_offsets):
        tensor.fill_(GARBAGE)
    rows.segment_ids.fill_(GARBAGE)
    chosen = torch.tensor(places, dtype=torch.int64), torch.tensor(seq_lens, dtype=index_dtype)
    queries = Queries(*(tensor.to(DEVICE) for tensor in chosen), first, num_queries)
    return rows, RowTables(**{name: table.to(DEVICE) for name, table in tables.items()}), queries, seen


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize(
    "bs, width, first, num_queries, index_dtype",
    [
        (1, 20, 0, 1, torch.int64),
        (5, 2500, 1, 4, torch.int32),
        (3, 300, -3, 4, torch.int64),
        (4, 60, 2, 1, torch.int32),
        (3, 40, -7, 8, torch.int64),
        (270, 12, 0, 1, torch.int32),
        (90, 16, 1, 3, torch.int64),
    ],
)
def test_whole_rows(bs, width, first, num_queries, index_dtype, name):
    """A decode step, the verification of a chain, a draft's extension, whose first queries see nothing in a request
    that pads the batch, and a later draft; few rows and more than one program counts at once."""
    rows, tables, queries, seen = arguments(random.Random(bs), bs, width, index_dtype, first, num_queries)
    assert get_implementation(name).whole_rows(rows, tables, queries) is None
    end = 0
    for b, (row, length) in enumerate(seen):
        assert rows.kv_indptr[b] == end
        end += length
        assert torch.equal(rows.kv_indices[end - length : end], tables.req_to_token[row, :length])
        assert rows.num_segments[b] == (count := tables.num_segments[row])
        for each in ("segment_ends", "segment_offsets", "segment_ids"):
            assert torch.equal(getattr(rows, each)[b, :count], getattr(tables, each)[row, :count])
    assert rows.kv_indptr[-1] == end and (rows.kv_indices[end:] == GARBAGE).all()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_no_rows(name):
    rows, tables, queries, _ = arguments(random.Random(0), 0, 20, torch.int64, 0, 1)
    get_implementation(name).whole_rows(rows, tables, queries)
    assert rows.kv_indptr.tolist() == [0]


@pytest.mark.parametrize("wrong", [field.name for field in dataclasses.fields(RowTables)])
def test_a_wrong_table_is_named(wrong):
    tables = arguments(random.Random(0), 2, 20, torch.int64, 0, 1)[1]
    with pytest.raises(ValueError, match=f"^{wrong}: expected dtype"):
        dataclasses.replace(tables, **{wrong: getattr(tables, wrong).float()})
    if wrong != "req_to_token":
        with pytest.raises(ValueError, match=f"^{wrong}: expected shape"):
            dataclasses.replace(tables, **{wrong: getattr(tables, wrong)[1:]})


def test_wrong_queries_are_named():
    places = torch.arange(2)
    with pytest.raises(ValueError, match="^places: expected dtype torch.int64"):
        Queries(places.int(), places)
    with pytest.raises(ValueError, match=r"^seq_lens: expected shape \[2\]"):
        Queries(places, places[1:])


MISFITS = {
    "rows: expected as many as queries, 2, got 3": dict(bs=3),
    "rows: expected room for 140 segments, got 139": dict(max_segments=MAX_SEGMENTS - 1),
    "segment_ids: expected a tensor, got the other": dict(shared=False),
    "tables: expected device meta, got ": dict(device="meta"),
}


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("reason", MISFITS)
def test_rows_must_fit(reason, name):
    _, tables, queries, _ = arguments(random.Random(0), 2, 20, torch.int64, 0, 1)
    rows = Rows.allocate(**dict(bs=2, num_kv=50, max_segments=MAX_SEGMENTS, device=DEVICE) | MISFITS[reason])
    with pytest.raises(ValueError, match=f"^{reason}"):
        get_implementation(name).whole_rows(rows, tables, queries)


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_queries_must_be_where_the_tables_are(name):
    rows, tables, queries, _ = arguments(random.Random(0), 2, 20, torch.int64, 0, 1)
    elsewhere = Queries(queries.places.to("meta"), queries.seq_lens.to("meta"))
    with pytest.raises(ValueError, match="^queries: expected device .*, got meta"):
        get_implementation(name).whole_rows(rows, tables, elsewhere)

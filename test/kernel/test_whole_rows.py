"""whole_rows: the tokens that each query of a batch sees, in order, and the segments of its request."""

import random

import pytest
import torch
from ragged import DEVICE, GARBAGE

from sgl_kernel_lazy import get_implementation

NUM_ROWS, MAX_SEGMENTS = 300, 140


def arguments(rng, bs, width, index_dtype, first, num_queries):
    """All arguments, the tables filled, what is written full of garbage; and the row and length of each query."""
    total = bs * num_queries

    def ints(*shape):
        return torch.tensor([rng.randrange(10**6) for _ in range(torch.Size(shape).numel())], dtype=torch.int32).view(
            shape
        )

    counts = torch.tensor([rng.choice([0, 1, 3, MAX_SEGMENTS]) for _ in range(NUM_ROWS)], dtype=torch.int32)
    # As the tables of a server are, columns of one record.
    records = torch.cat([counts[:, None], ints(NUM_ROWS, 3 * MAX_SEGMENTS)], dim=1)
    ends, offsets, ids = records[:, 1:].split(MAX_SEGMENTS, dim=1)
    rows = rng.sample(range(NUM_ROWS), bs)
    longest = width - num_queries - 2
    seq_lens = [rng.choice([1, 2, rng.randint(1, longest), longest]) for _ in rows]
    queries = [(row, max(n + first + i, 1)) for row, n in zip(rows, seq_lens, strict=True) for i in range(num_queries)]
    kv_indptr = torch.full((total + 1,), GARBAGE, dtype=torch.int32)
    kv_indptr[0] = 0
    written = [torch.full(shape, GARBAGE, dtype=torch.int32) for shape in ((total,), *[(total, MAX_SEGMENTS)] * 3)]
    given = [
        kv_indptr,
        torch.full((sum(n for _, n in queries) + 3,), GARBAGE, dtype=torch.int32),
        *written,
        ints(NUM_ROWS, width),
        records[:, 0],
        ends,
        offsets,
        ids,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(seq_lens, dtype=index_dtype),
    ]
    return [tensor.to(DEVICE) for tensor in given], queries


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
    given, queries = arguments(random.Random(bs), bs, width, index_dtype, first, num_queries)
    options = dict(first=first, num_queries=num_queries)
    assert get_implementation(name).whole_rows(*given, **options) is None
    kv_indptr, kv_indices, num_segments, *segments = (tensor.cpu() for tensor in given[:6])
    req_to_token, counts, *tables = (tensor.cpu() for tensor in given[6:11])
    end = 0
    for b, (row, length) in enumerate(queries):
        assert kv_indptr[b] == end
        end += length
        assert torch.equal(kv_indices[end - length : end], req_to_token[row, :length])
        assert num_segments[b] == (count := counts[row])
        for copied, table in zip(segments, tables, strict=True):
            assert torch.equal(copied[b, :count], table[row, :count])
    assert kv_indptr[-1] == end and (kv_indices[end:] == GARBAGE).all()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_no_rows(name):
    given, _ = arguments(random.Random(0), 0, 20, torch.int64, 0, 1)
    get_implementation(name).whole_rows(*given, first=0, num_queries=1)
    assert given[0].tolist() == [0]


NAMES = (
    "kv_indptr", "kv_indices", "num_segments", "segment_ends", "segment_offsets", "segment_ids", "req_to_token",
    "all_num_segments", "all_ends", "all_offsets", "all_ids", "rows", "seq_lens",
)  # fmt: skip


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("wrong", NAMES)
def test_a_wrong_tensor_is_named(wrong, name):
    given, _ = arguments(random.Random(0), 2, 20, torch.int64, 0, 1)
    place = NAMES.index(wrong)
    given[place] = given[place].float()
    with pytest.raises(ValueError, match=f"{wrong}: expected dtype"):
        get_implementation(name).whole_rows(*given, first=0, num_queries=1)

"""window_rows: exactly the tokens of each row that are in the window, segment by segment."""

import dataclasses
import random

import pytest
import torch
from ragged import DEVICE, GARBAGE

from sgl_kernel_lazy import get_implementation
from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, WindowTables

WIDTH, MAX_SEGMENTS = 300, 5


def draw(rng, window):
    """A row: the position of each token, and where its segments end. The tokens after its prompt are in order."""
    prompt_len = rng.choice([0, 3, rng.randint(1, window), rng.randint(window, 200)])
    cuts = sorted(rng.sample(range(prompt_len + 1), min(prompt_len, rng.randint(0, MAX_SEGMENTS))))
    places = rng.sample(range(prompt_len), prompt_len)
    parts = [sorted(places[begin:end]) for begin, end in zip([0, *cuts], [*cuts, prompt_len], strict=True)]
    positions = [p for part in parts for p in part]
    return positions + list(range(prompt_len, prompt_len + rng.randint(1, 90))), cuts


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("has_pool", [False, True])
@pytest.mark.parametrize("window", [1, 7, 64, 150])
@pytest.mark.parametrize("first, num_queries", [(0, 1), (1, 4), (-3, 4), (2, 1)])
def test_window_rows(first, num_queries, window, has_pool, index_dtype, name):
    """A decode step, the verification of a chain, a draft's extension and a later draft; with slots in a pool of their
    own, and without."""
    rng = random.Random(window)
    num_rows, bs, max_tail = 9, 6, window + 3  # a tail may be longer than the window
    total, num_slots = bs * num_queries, 10**4
    drawn = [draw(rng, window) for _ in range(num_rows)]
    places = rng.sample(range(num_rows), bs)
    req_to_token = torch.tensor([rng.sample(range(num_slots), WIDTH) for _ in range(num_rows)], dtype=torch.int32)
    tail_indices, tail_positions = torch.full((2, num_rows, max_tail), torch.iinfo(torch.int32).min, dtype=torch.int32)
    tail_ends, num_segments = torch.full((num_rows, MAX_SEGMENTS), GARBAGE, dtype=torch.int32), []
    for row, (positions, cuts) in enumerate(drawn):
        prompt_len = max([i + 1 for i, p in enumerate(positions) if i != p], default=0)
        tail = [i for i in range(prompt_len) if positions[i] >= prompt_len - max_tail]
        tail_indices[row, : len(tail)] = torch.tensor(tail)
        tail_positions[row, : len(tail)] = torch.tensor([positions[i] for i in tail])
        tail_ends[row, : len(cuts)] = torch.tensor([sum(i < cut for i in tail) for cut in cuts], dtype=torch.int32)
        num_segments.append(len(cuts) if tail else 0)
    longest = [len(drawn[row][0]) for row in places]  # the last query of each sees all tokens
    seq_lens = torch.tensor([n - first - num_queries + 1 for n in longest], dtype=index_dtype)
    # As the tables of a server are, columns of one record.
    records = torch.randint(10**6, (num_rows, 1 + MAX_SEGMENTS), dtype=torch.int32)
    records[:, 0] = torch.tensor(num_segments)
    counts, offsets = records[:, 0], records[:, 1:]
    window_slots = torch.tensor(rng.sample(range(num_slots), num_slots)) if has_pool else torch.arange(num_slots)
    given = dict(
        req_to_token=req_to_token, num_segments=counts, segment_offsets=offsets, tail_ends=tail_ends,
        tail_indices=tail_indices, tail_positions=tail_positions, window_slots=window_slots if has_pool else None,
    )  # fmt: skip
    given = {key: tensor if tensor is None else tensor.to(DEVICE) for key, tensor in given.items()}
    tables = WindowTables(**given, window=window)
    queries = Queries(torch.tensor(places).to(DEVICE), seq_lens.to(DEVICE), first, num_queries)
    listed, reference = (Rows.allocate(total, total * window + 2, MAX_SEGMENTS, DEVICE, shared=False) for _ in "ab")
    for each in (listed, reference):
        for tensor in (each.kv_indptr[1:], each.kv_indices, each.num_segments, each.segment_ends, each.segment_offsets):
            tensor.fill_(GARBAGE)
    get_implementation("torch").window_rows(reference, tables, queries)
    assert get_implementation(name).window_rows(listed, tables, queries) is None
    fields = "kv_indptr", "kv_indices", "num_segments", "segment_ends", "segment_offsets"
    assert all(torch.equal(getattr(listed, field), getattr(reference, field)) for field in fields)
    kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets = (
        getattr(listed, field).cpu() for field in fields
    )
    own_slots = window_slots[req_to_token]
    seen_by = [(row, n - behind) for row, n in zip(places, longest, strict=True) for behind in range(num_queries)[::-1]]
    for b, (row, n) in enumerate(seen_by):
        positions, cuts = drawn[row]
        n = max(n, 1)
        slots = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].tolist()
        assert len(slots) == min(n, window)
        assert num_segments[b] == counts[row]
        assert torch.equal(segment_offsets[b, : counts[row]], offsets[row, : counts[row]])
        if sorted(positions[:n]) != [*range(n)]:  # it is within the prompt, as queries of padding alone are
            continue
        seen = [i for i, p in enumerate(positions[:n]) if p >= n - window]
        assert sorted(slots) == sorted(own_slots[row, seen].tolist())
        begin, listed_begin = 0, 0
        for cut, listed_end in zip(cuts[: counts[row]], segment_ends[b].tolist(), strict=False):
            of_segment = own_slots[row, [i for i in seen if begin <= i < cut]]
            assert slots[listed_begin:listed_end] == of_segment.tolist()
            begin, listed_begin = cut, listed_end
    assert (kv_indices[kv_indptr[-1] :] == GARBAGE).all()


def some_tables(**changes):
    ints = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    given = {field.name: ints for field in dataclasses.fields(WindowTables)}
    return WindowTables(**given | dict(num_segments=ints[0], window=1, window_slots=None) | changes)


def test_a_window_must_be_positive():
    with pytest.raises(ValueError, match="^window: expected a positive int or None, got 0"):
        some_tables(window=0)


@pytest.mark.parametrize("wrong", [field.name for field in dataclasses.fields(WindowTables) if field.name != "window"])
def test_a_wrong_table_is_named(wrong):
    floats = torch.zeros(1, device=DEVICE) if "_s" in wrong else torch.zeros(1, 1, device=DEVICE)
    with pytest.raises(ValueError, match=f"^{wrong}: expected "):
        some_tables(**{wrong: floats})


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_rows_of_a_window_share_nothing(name):
    queries = Queries(*torch.ones(2, 1, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="^segment_ids: expected None, in a window"):
        get_implementation(name).window_rows(Rows.allocate(1, 1, 1, DEVICE), some_tables(), queries)

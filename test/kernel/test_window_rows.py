"""window_rows: exactly the tokens of each row that are in the window, segment by segment."""

import random

import pytest
import torch
from ragged import DEVICE, GARBAGE

from sgl_kernel_lazy import get_implementation

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
@pytest.mark.parametrize("window", [1, 7, 64, 150])
def test_window_rows(window, index_dtype, name):
    rng = random.Random(window)
    num_rows, bs, max_tail = 9, 6, window + 3  # a tail may be longer than the window
    drawn = [draw(rng, window) for _ in range(num_rows)]
    rows = torch.tensor(rng.sample(range(num_rows), bs))
    req_to_token = torch.tensor([rng.sample(range(10**6), WIDTH) for _ in range(num_rows)], dtype=torch.int32)
    tail_indices, tail_positions = torch.full((2, num_rows, max_tail), torch.iinfo(torch.int32).min, dtype=torch.int32)
    tail_ends, num_segments = torch.full((num_rows, MAX_SEGMENTS), GARBAGE, dtype=torch.int32), []
    for row, (positions, cuts) in enumerate(drawn):
        prompt_len = max([i + 1 for i, p in enumerate(positions) if i != p], default=0)
        tail = [i for i in range(prompt_len) if positions[i] >= prompt_len - max_tail]
        tail_indices[row, : len(tail)] = torch.tensor(tail)
        tail_positions[row, : len(tail)] = torch.tensor([positions[i] for i in tail])
        tail_ends[row, : len(cuts)] = torch.tensor([sum(i < cut for i in tail) for cut in cuts], dtype=torch.int32)
        num_segments.append(len(cuts) if tail else 0)
    seq_lens = torch.tensor([len(drawn[row][0]) for row in rows.tolist()], dtype=index_dtype)
    kv_indptr = torch.zeros(bs + 1, dtype=torch.int32)
    kv_indices = torch.full((bs * window + 2,), GARBAGE, dtype=torch.int32)
    segment_ends = torch.full((bs, MAX_SEGMENTS), GARBAGE, dtype=torch.int32)
    counts = torch.tensor(num_segments, dtype=torch.int32)[rows]
    arguments = [
        kv_indptr, kv_indices, segment_ends, counts, req_to_token, rows, seq_lens, tail_ends, tail_indices,
        tail_positions,
    ]  # fmt: skip
    arguments = [tensor.to(DEVICE) for tensor in arguments]
    assert get_implementation(name).window_rows(*arguments, window=window) is None
    kv_indptr, kv_indices, segment_ends, *_ = (tensor.cpu() for tensor in arguments)
    for b, row in enumerate(rows.tolist()):
        positions, cuts = drawn[row]
        seen = [i for i, p in enumerate(positions) if p >= len(positions) - window]
        listed = kv_indices[kv_indptr[b] : kv_indptr[b + 1]].tolist()
        assert sorted(listed) == sorted(req_to_token[row, seen].tolist())
        begin, listed_begin = 0, 0
        for cut, listed_end in zip(cuts[: counts[b]], segment_ends[b].tolist(), strict=False):
            of_segment = req_to_token[row, [i for i in seen if begin <= i < cut]]
            assert listed[listed_begin:listed_end] == of_segment.tolist()
            begin, listed_begin = cut, listed_end
    assert (kv_indices[kv_indptr[-1] :] == GARBAGE).all()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_window_must_be_positive(name):
    ints = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    ids = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    arguments = [torch.zeros(2, dtype=torch.int32, device=DEVICE), ints[0], ints, ints[0], ints, ids, ids, *[ints] * 3]
    with pytest.raises(ValueError, match="window: expected a positive int or None, got 0"):
        get_implementation(name).window_rows(*arguments, window=0)
    with pytest.raises(ValueError, match="rows: expected dtype torch.int64"):
        get_implementation(name).window_rows(*arguments[:5], ints[0], *arguments[6:], window=1)

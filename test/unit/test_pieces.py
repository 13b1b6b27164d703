"""Pieces of random batches, carried out on strings of tokens: a state is the tokens that it has gone through."""

import itertools

import pytest
import torch

from fakes.recurrent_batches import NUM_SLOTS, Batch
from sglang_lazy.recurrent.pieces import Chunk, ChunkRow, Pieces, Text, TextRow

WIDTH, CPU = 3, torch.device("cpu")


def draw(seed):
    return Batch(seed, longest=6, shortest=WIDTH)


def link(rows, before, requests, chunks, pieces=None):
    """What `link_states` does, on strings of tokens."""
    for initial, (begin, end) in zip(
        rows.initial_slots.tolist(), itertools.pairwise(rows.part_indptr.tolist()), strict=True
    ):
        state = requests[initial] if initial >= 0 else []
        parts = rows.parts[begin:end].tolist()
        assert pieces or all(part >= 0 for part in parts[:-1]), "a piece within a row needs its transition"
        for part in parts:
            if part < 0:
                before[~part] = state
            state = state + (chunks[part] if part >= 0 else pieces[~part] if pieces else [])


def carry_out(plan, batch):
    """The states before each piece, and the slots written, as a layer's pass computes them."""
    bounds = itertools.pairwise(plan.cu_seqlens.tolist())
    new = [batch.tokens[begin:end] for begin, end in bounds]
    before, chunks, requests = [None] * len(new), list(batch.chunks), list(batch.requests)
    if plan.early is not None:
        link(plan.early, before, requests, chunks)
    owned = [list(zip(*(each.tolist() for each in group), strict=True)) if group else [] for group in (
        plan.chunks, plan.resumed, plan.last
    )]  # fmt: skip
    first = [[] if plan.two_calls else start for start in before]
    for piece, slot in owned[1]:
        first[piece] = chunks[slot]
    after = [start + tokens for start, tokens in zip(first, new, strict=True)]
    for piece, slot in owned[0]:
        chunks[slot] = after[piece]
    if plan.late is not None:
        link(plan.late, before, requests, chunks, after)
    if plan.two_calls:
        after = [start + tokens for start, tokens in zip(before, new, strict=True)]
    for piece, slot in owned[2]:
        requests[slot] = after[piece]
    return before, requests, chunks


@pytest.mark.parametrize("seed", range(300))
def test_states_of_random_batches(seed):
    batch = draw(seed)
    plan = Pieces.of(batch.rows, WIDTH, CPU)
    assert sum(plan.lens) == len(batch.tokens) and plan.indices.tolist() == list(range(len(plan.lens)))
    before, requests, chunks = carry_out(plan, batch)
    assert before == batch.before
    for slot in range(NUM_SLOTS):
        assert requests[slot] == batch.requests_after.get(slot, batch.requests[slot])
        assert chunks[slot] == batch.chunks_after.get(slot, batch.chunks[slot]), "that of a chunk, or of a beginning"


def last_inputs(tokens):
    return [0] * (WIDTH - len(tokens)) + tokens[max(0, len(tokens) - WIDTH) :]


@pytest.mark.parametrize("seed", range(300))
def test_last_inputs_of_random_batches(seed):
    batch = draw(seed)
    plan = Pieces.of(batch.rows, WIDTH, CPU)
    known = [torch.tensor([[last_inputs(tokens)] for tokens in group]).float() for group in (
        batch.requests, batch.chunks
    )]  # fmt: skip
    known[0][0] = known[1][0] = float("nan")  # a slot for padding
    actual = plan.inputs.before(*known, torch.tensor(batch.tokens).float()[:, None])
    assert actual[:, 0].tolist() == [last_inputs(tokens) for tokens in batch.before]


def test_random_batches_have_all_there_is():
    plans = [Pieces.of(draw(seed).rows, WIDTH, CPU) for seed in range(300)]
    for has in (
        lambda plan: plan.early is None,
        lambda plan: plan.late is None,
        lambda plan: plan.late is not None and plan.early is not None and plan.resumed is not None,
        lambda plan: plan.two_calls and plan.late is None,
        lambda plan: plan.last is None,
        lambda plan: plan.chunks is None,
        lambda plan: not plan.two_calls and plan.chunks is not None and plan.last is not None,
    ):
        assert sum(map(has, plans)) >= 3


def test_one_question_behind_chunks_takes_one_call():
    rows = [TextRow(3, False, [Chunk(1), Chunk(2), Text(5)]), TextRow(4, True, [Text(1)]), ChunkRow(7, 9)]
    plan = Pieces.of(rows, WIDTH, CPU)
    assert not plan.two_calls and plan.lens == [5, 1, 9]
    assert plan.early.initial_slots.tolist() == [-1, 4, -1] and plan.early.parts.tolist() == [1, 2, -1, -2, -3]


@pytest.mark.parametrize(
    ("reason", "rows"),
    {
        "a row that ends in text": [TextRow(1, False, [Text(2), Chunk(3)])],
        "at least one token, got 0": [TextRow(1, False, [Text(0)])],
        "each chunk once, got slot 2": [ChunkRow(2, 4), ChunkRow(2, 4)],
        "preamble to be complete, got slot 1": [ChunkRow(1, 4), ChunkRow(2, 4, True, 1)],
    }.items(),
)
def test_rows_that_cannot_be(reason, rows):
    with pytest.raises(ValueError, match=reason):
        Pieces.of(rows, WIDTH, CPU)

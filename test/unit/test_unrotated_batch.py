"""The rows that SGLang's own attention is shown of prompts with chunks, if nothing is rotated: under its causal mask
every token sees the tokens that precede it in the prompt, and no others."""

import random
from array import array

import numpy as np
import pytest

from sglang_lazy.attention.rows import Pass
from sglang_lazy.attention.unrotated import UnrotatedBatch
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.prompt import LinkedPrompt
from sglang_lazy.core.row_order import FillRow, Row
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.core.state import LinkedRequest
from sglang_lazy.policies import get_policy


def linked(length, *chunks, cached=0):
    """A request whose chunks are at these positions of its prompt; `cached` tokens of its first text are cached."""
    ids, layout = array("q", range(length)), PromptLayout(chunks)
    policy = get_policy("block")
    prompt = LinkedPrompt.build(ids, layout, policy.kept(layout, ids), None, array("q"), None, None)
    state = LinkedRequest(prompt, policy, [None] * len(chunks), [False] * len(chunks), recurrent=True)
    state.row = Row(prompt, [cached, *[0] * (len(prompt.spans) - 1)], length)
    return state


def seen(row):
    """By new token of a row, its index in the request's row and those that it sees."""
    listed = [index for start, end in row.ranges for index in range(start, end)]
    return {listed[i]: set(listed[: i + 1]) for i in range(row.prefix_len, len(listed))}


def drawn(dice):
    """A prompt that begins and ends in text, and the pass that computes it from a random token on."""
    bounds, end = [], dice.randint(1, 4)
    for _ in range(dice.randint(1, 4)):
        bounds.append((end, end := end + dice.randint(2, 5)))
        end += dice.choice([0, 1, 3])
    length = end + dice.randint(1, 4)
    first = bounds[0][0]
    state = linked(length, *bounds, cached=dice.choice([0, first]))
    begin = sum(stop - start for start, stop in bounds) + state.row.cached[0]
    before = dice.randint(begin, length - 1)
    return state, before, dice.randint(1, length - before)


@pytest.mark.parametrize("seed", range(200))
def test_tokens_see_what_precedes_them_in_the_prompt(seed):
    state, before, new = drawn(random.Random(seed))
    positions = state.row.positions_of(0, before + new)
    batch = UnrotatedBatch.of(Pass([state], [before], [new]))
    shown = {}
    for row in [] if batch is None else batch.rows:
        assert row.ordinary and np.array_equal(
            row.positions, positions[[i for a, b in row.ranges for i in range(a, b)]]
        )
        shown |= seen(row)
    if batch is None:
        shown = {index: set(range(index + 1)) for index in range(before, before + new)}
    assert list(shown) == [*range(before, before + new)], "in the order of the batch's tokens"
    for index, others in shown.items():
        assert others == set(np.flatnonzero(positions <= positions[index]).tolist())


def test_text_behind_all_chunks_and_decode_are_left_to_sglang():
    state = linked(20, (2, 6), (9, 15), cached=2)
    assert UnrotatedBatch.of(Pass([state, None], [15, 0], [5, 7])) is None
    assert UnrotatedBatch.of(Pass([state, None])) is None
    assert UnrotatedBatch.of(Pass([state], [12], [8])) is not None


def test_chunks_of_a_fill_do_not_see_one_another():
    state = linked(12, (0, 4), (4, 9))
    fill = Fill(state.prompt.chunks, owner=None)
    fill.row = FillRow([4, 5], [0, 0], has_preamble=False)
    batch = UnrotatedBatch.of(Pass([fill, None], [0, 3], [9, 2]))
    assert [(row.request, row.ranges, row.num_new) for row in batch.rows] == [
        (0, [(0, 4)], 4), (0, [(4, 9)], 5), (1, [(0, 5)], 2)
    ]  # fmt: skip


def test_what_does_not_fit_is_refused():
    state = linked(20, (2, 6), (9, 15))
    with pytest.raises(ValueError, match="at most 1 pieces"):
        UnrotatedBatch.of(Pass([state], [10], [10]), max_rows=1)
    with pytest.raises(ValueError, match="windows"):
        UnrotatedBatch.of(Pass([state], [10], [10]), windows=True)

"""What recurrent layers are told of a batch: where text and chunks alternate, and what goes on from an earlier pass."""

from array import array

import numpy as np
import pytest
import torch

from sglang_lazy.attention.rows import Pass
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.prompt import LinkedPrompt
from sglang_lazy.core.row_order import FillRow, Row
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.core.state import LinkedRequest
from sglang_lazy.policies import get_policy
from sglang_lazy.recurrent.pieces import Chunk, ChunkRow, Pieces, Text, TextRow
from sglang_lazy.recurrent.rows import RowStates, rows_of


def linked(length: int, *chunks: tuple[int, int]) -> LinkedRequest:
    """A request whose chunks are at these positions of its prompt."""
    ids, layout = array("q", range(length)), PromptLayout(chunks)
    policy = get_policy("block")
    prompt = LinkedPrompt.build(ids, layout, policy.kept(layout, ids), None, array("q"), None, None)
    state = LinkedRequest(prompt, policy, [None] * len(chunks), [False] * len(chunks), recurrent=True)
    state.row = Row(prompt, [0] * len(prompt.spans), length)
    return state


def rows(state, start, count, slots=(), text=None):
    """The rows of one request that computes `count` tokens after the first `start` of its row."""
    return rows_of(Pass([state], [start], [count]), [RowStates(slots, text)])


def test_plain_text():
    assert rows(None, 0, 5) == [TextRow(0, False, [Text(5)])]
    assert rows(None, 3, 5) == [TextRow(0, True, [Text(5)])]


def test_text_and_chunks_alternate():
    """Text, a chunk, text, two chunks without text between them, text."""
    state = linked(20, (2, 6), (7, 10), (10, 15))
    (row,) = rows(state, 12, 8, (31, 32, 33))
    assert row == TextRow(0, False, [Text(2), Chunk(31), Text(1), Chunk(32), Chunk(33), Text(5)])


def test_a_prompt_that_begins_with_a_chunk():
    assert rows(linked(6, (0, 4)), 4, 2, (9,)) == [TextRow(0, False, [Chunk(9), Text(2)])]


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_prompt_in_parts(cut):
    """Both parts together are the whole, wherever it is cut: a chunk at the cut belongs to the second."""
    state, slots = linked(20, (2, 6), (7, 10), (10, 15)), (31, 32, 33)
    (whole,), (first,), (second,) = (rows(state, *part, slots) for part in ((12, 8), (12, cut), (12 + cut, 8 - cut)))
    assert (first.resumed, second.resumed) == (False, True)

    def tokens(parts):
        return [each for part in parts for each in ([None] * part.num_tokens if isinstance(part, Text) else [part])]

    assert tokens(first.parts) + tokens(second.parts) == tokens(whole.parts)


def test_a_request_that_decodes_beside_others():
    """Its state has gone through all of its chunks."""
    assert rows(linked(20, (2, 6), (7, 10)), 22, 1, (31, 32)) == [TextRow(0, True, [Text(1)])]


@pytest.mark.parametrize("cut", range(1, 6))
def test_a_second_turn(cut):
    """It begins in the state after its cached text, which has gone through the chunks before that."""
    state = linked(20, (2, 6), (7, 10), (13, 15))
    state.row = Row(state.prompt, [2, 1, 1, 0], 20)  # the third span begins at 10
    (first,), (second,) = rows(state, 13, cut, (31, 32, 33), 40), rows(state, 13 + cut, 7 - cut, (31, 32, 33), 40)
    assert first.parts[0] == Chunk(40) and not first.resumed and second.resumed
    counts = [part if isinstance(part, Chunk) else part.num_tokens for part in [*first.parts[1:], *second.parts]]
    assert [part for part in counts if isinstance(part, Chunk)] == [Chunk(33)]
    before = counts[: counts.index(Chunk(33))]
    assert sum(before) == 2 and sum(part for part in counts if part != Chunk(33)) == 7


def test_chunks_being_computed():
    """Each from zero, but for one that an earlier pass has begun."""
    fill = Fill([], None, states=[4, 5, 6])
    fill.row = FillRow([3, 4, 2], [0, 0, 0], has_preamble=False)
    assert rows(fill, 0, 5) == [ChunkRow(4, 3), ChunkRow(5, 2)]
    assert rows(fill, 5, 4) == [ChunkRow(5, 2, resumed=True), ChunkRow(6, 2)]


def test_chunks_after_a_preamble():
    """The preamble is computed first, from zero, and may be complete in an earlier pass."""
    fill = Fill([], None, states=[4, 5, 6])
    fill.row = FillRow([3, 4, 2], [0, 0, 0], has_preamble=True)
    assert rows(fill, 0, 9) == [ChunkRow(4, 3), ChunkRow(5, 4, after=4), ChunkRow(6, 2, after=4)]
    assert rows(fill, 0, 2) == [ChunkRow(4, 2)]
    assert rows(fill, 2, 3) == [ChunkRow(4, 1, resumed=True), ChunkRow(5, 2, after=4)]
    assert rows(fill, 5, 4) == [ChunkRow(5, 2, resumed=True, after=4), ChunkRow(6, 2, after=4)]


def test_requests_have_slots_of_their_own():
    batch = [TextRow(0, True, [Text(2)]), ChunkRow(3, 2), TextRow(1, False, [Chunk(7), Text(1)])]
    pieces = Pieces.of(batch, 2, torch.device("cpu")).in_slots(torch.tensor([8, 9]))
    assert pieces.last.slots.tolist() == [8, 9]
    assert pieces.chunks.slots.tolist() == [3]
    assert pieces.early.initial_slots.tolist() == [8, -1, -1]
    before = pieces.inputs.before(torch.arange(10.0)[:, None, None], 100 + torch.arange(10.0)[:, None, None], None)
    assert before.flatten().tolist() == [8, 0, 107]
    assert np.array_equal(pieces.lens, [2, 2, 1])

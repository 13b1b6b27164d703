"""The rows of a prefill batch as recurrent layers see them: new text and the chunks before it, and new chunks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_lazy.attention.rows import Pass
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.state import LinkedRequest
from sglang_lazy.recurrent.pieces import Chunk, ChunkRow, Text, TextRow


class RowStates(NamedTuple):
    """The slots of the states that a row depends on.

    chunks: those of its chunks.  text: that at the end of its cached text; None without cached text.
    leading: that at the end of the text before its chunks, if the pass computes it and it is kept.
    """

    chunks: Sequence[int] = ()
    text: int | None = None
    leading: int | None = None


def rows_of(current: Pass, slots: Sequence[RowStates]) -> list[TextRow | ChunkRow]:
    """The rows of a prefill pass, in the order of its tokens. The slot of a `TextRow` is its request's index.

    slots: per request; ignored for those that are not linked.
    """
    states, prefix_lens, extend_lens = current
    assert prefix_lens is not None and extend_lens is not None, "decode needs no rows: a state goes on as it is"
    rows: list[TextRow | ChunkRow] = []
    for i, (state, before, new) in enumerate(zip(states, prefix_lens, extend_lens, strict=True)):
        if isinstance(state, Fill):
            preamble = state.states[0] if state.row.has_preamble else None
            for part, count, resumed in state.row.computed(before, before + new):
                rows.append(ChunkRow(state.states[part], count, resumed, preamble if part else None))
        elif isinstance(state, LinkedRequest):
            rows.append(_linked_row(i, state, slots[i], before, new))
        else:
            rows.append(TextRow(i, before > 0, [Text(new)]))
    return rows


def _linked_row(request: int, state: LinkedRequest, slots: RowStates, before: int, new: int) -> TextRow:
    """A piece ends where the next token's position is not the next one: there are chunks in between.

    A cached state is that of a chunk which makes it of a state of zero.
    """
    seen = 0  # how much of the prompt the state before the pass has gone through
    if before > state.prompt.num_chunk_tokens:
        seen = int(state.row.positions_of(before - 1, before)[0]) + 1
    resumed = before > state.row.computed_start[0]
    positions = state.row.positions_of(before, before + new)
    parts: list[Chunk | Text] = [] if resumed or slots.text is None else [Chunk(slots.text)]
    chunks = [pair for pair in zip(state.prompt.chunks, slots.chunks, strict=True) if pair[0].start >= seen]
    for piece in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        while chunks and chunks[0][0].start < piece[0]:
            parts.append(Chunk(chunks.pop(0)[1]))
        parts.append(Text(len(piece)))
    return TextRow(request, resumed, parts, slots.leading)

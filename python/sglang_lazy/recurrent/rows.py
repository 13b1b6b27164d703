"""The rows of a prefill batch as recurrent layers see them: new text and the chunks before it, and new chunks."""

from collections.abc import Sequence

import numpy as np

from sglang_lazy.attention.rows import Pass
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.state import LinkedRequest
from sglang_lazy.recurrent.pieces import Chunk, ChunkRow, Text, TextRow


def rows_of(current: Pass, chunk_slots: Sequence[Sequence[int]]) -> list[TextRow | ChunkRow]:
    """The rows of a prefill pass, in the order of its tokens. The slot of a `TextRow` is its request's index.

    chunk_slots: per request, the slots of the states of its chunks; none if it has no part in chunk reuse.
    """
    states, prefix_lens, extend_lens = current
    assert prefix_lens is not None and extend_lens is not None, "decode needs no rows: a state goes on as it is"
    rows: list[TextRow | ChunkRow] = []
    for i, (state, before, new) in enumerate(zip(states, prefix_lens, extend_lens, strict=True)):
        if isinstance(state, Fill):
            parts = state.row.computed(before, before + new)
            rows += [ChunkRow(state.states[part], count, resumed) for part, count, resumed in parts]
        elif isinstance(state, LinkedRequest):
            rows.append(_linked_row(i, state, chunk_slots[i], before, new))
        else:
            rows.append(TextRow(i, before > 0, [Text(new)]))
    return rows


def _linked_row(request: int, state: LinkedRequest, slots: Sequence[int], before: int, new: int) -> TextRow:
    """A piece ends where the next token's position is not the next one: there are chunks in between."""
    resumed = before > state.prompt.num_chunk_tokens
    seen = int(state.row.positions[before - 1]) + 1 if resumed else 0
    positions = state.row.positions_of(before, before + new)
    parts: list[Chunk | Text] = []
    chunks = [pair for pair in zip(state.prompt.chunks, slots, strict=True) if pair[0].start >= seen]
    for piece in np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1):
        while chunks and chunks[0][0].start < piece[0]:
            parts.append(Chunk(chunks.pop(0)[1]))
        parts.append(Text(len(piece)))
    return TextRow(request, resumed, parts)

"""Batches of models whose attention rotates nothing: keys mean the same wherever they are, and SGLang's own attention
reads chunks. It only has to be shown each piece of text behind what it sees."""

import dataclasses
import itertools
import math

import numpy as np

from sglang_lazy.attention.rows import AttentionRow, LinkedBatch, Pass
from sglang_lazy.core.state import LinkedRequest


@dataclasses.dataclass(frozen=True)
class UnrotatedBatch(LinkedBatch):
    """A prefill batch in which a request may have several rows, one for each piece of its text. SGLang's attention
    computes all of them."""

    @classmethod
    def of(
        cls, current: Pass, separate: bool = True, max_rows: float = math.inf, windows: bool = False
    ) -> "UnrotatedBatch | None":
        """The description of a pass about to run; None if SGLang's own will do: in decode, which sees all of a row, and
        for text behind everything else in its row. The order within a row does not matter.

        max_rows: the most rows that SGLang's attention can take.
        Raises ValueError for a batch with more rows, or of a model with windows.
        """
        states, prefix_lens, extend_lens = current
        if prefix_lens is None or extend_lens is None:
            return None
        if windows:
            raise ValueError("windows: expected none, since they depend on the order of a row")
        rows: list[AttentionRow] = []
        for i, (state, before, new) in enumerate(zip(states, prefix_lens, extend_lens, strict=True)):
            if isinstance(state, LinkedRequest):
                rows += _pieces(i, state.row.positions_of(0, before + new), before)
            else:
                rows += AttentionRow.of(i, state, before, new, windows=False)
        if len(rows) == len(states) and all(row.ranges == [(0, len(row.positions))] for row in rows):
            return None
        if len(rows) > max_rows:
            raise ValueError(f"expected at most {max_rows} pieces of text and chunks in a batch, got {len(rows)}")
        return cls(rows)


def _pieces(request: int, positions: np.ndarray, prefix_len: int) -> list[AttentionRow]:
    """A row for each piece: new tokens that follow one another in the prompt, which see all tokens of the request's row
    that precede them there, those of earlier pieces included.

    positions: of all tokens of the row, the first `prefix_len` of which are cached.
    """
    new = np.arange(prefix_len, len(positions))
    rows = []
    for piece in np.split(new, np.flatnonzero(np.diff(positions[new]) != 1) + 1):
        seen = np.flatnonzero(positions < positions[piece[0]])
        listed = np.concatenate([seen, piece])
        rows.append(AttentionRow(request, _ranges(listed), positions[listed], len(piece), ordinary=True))
    return rows


def _ranges(indices: np.ndarray) -> list[tuple[int, int]]:
    """The ranges that list these indices."""
    cuts = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(indices)]
    return [(int(indices[start]), int(indices[end - 1]) + 1) for start, end in itertools.pairwise(cuts)]

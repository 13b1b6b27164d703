"""How attention takes a batch: a row for each sequence of new tokens that see the same KV tokens."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_lazy.core.prompt import positions_in
from sglang_lazy.core.state import Fill, LinkedRequest, Probe, Undecided, lazy_state


class AttentionRow(NamedTuple):
    """New tokens of a prefill batch that follow one another and see the same KV tokens.

    Those of one request, or of one part of a fill: a chunk, or the preamble that it is computed behind.

    request: the place of the request in the batch.
    windows: the ranges of the request's row that hold the KV tokens, in order; the new ones are the last.
    positions: int32 [number of KV tokens].
    num_new: how many of them are to be computed.
    ordinary: whether each token sees all KV tokens before it, or a window of the last, and none after; no segments.
    probe: where the attention goes that its last tokens pay, if its request is a probe that sums it up.
    """

    request: int
    windows: Sequence[tuple[int, int]]
    positions: np.ndarray
    num_new: int
    ordinary: bool
    probe: Probe | None = None

    @property
    def prefix_len(self) -> int:
        return len(self.positions) - self.num_new

    @classmethod
    def of(
        cls,
        request: int,
        state: LinkedRequest | Undecided | Fill | None,
        prefix_len: int,
        extend_len: int,
        windows: bool,
    ) -> list["AttentionRow"]:
        """The rows of a request that computes `extend_len` tokens behind the first `prefix_len` of its row.

        windows: whether some layer has one, for which the order of what is cached matters, too.
        """
        row_len = prefix_len + extend_len
        if isinstance(state, Fill) and not state.row.is_sequence:
            return [
                cls(request, windows, positions_in([(0, sum(end - start for start, end in windows))]), num_new, True)
                for windows, num_new in state.row.parts(prefix_len, row_len)
            ]
        if not isinstance(state, LinkedRequest) or state.recomputes:
            return [cls(request, [(0, row_len)], positions_in([(0, row_len)]), extend_len, ordinary=True)]
        positions = state.row.positions_of(0, row_len)
        known = 0 if windows else prefix_len
        ordinary = not state.segments and np.array_equal(positions[known:], np.arange(known, row_len))
        probe = state.probe if state.policy.probes == "attention" else None
        return [cls(request, [(0, row_len)], positions, extend_len, ordinary, probe)]


class LinkedBatch(NamedTuple):
    """What attention has to know of a batch whose requests it cannot take as SGLang describes them.

    Nothing in decode, where a row sees all its KV tokens.

    rows: how attention takes the new tokens, in their order.
    linked: the places in `rows` of those that take the link path, ascending; the others are ordinary.
    """

    rows: Sequence[AttentionRow] = ()
    linked: Sequence[int] = ()

    @property
    def q_positions(self) -> np.ndarray:
        """int64 [number of new tokens]."""
        return np.concatenate([row.positions[row.prefix_len :] for row in self.rows], dtype=np.int64)

    @classmethod
    def of(
        cls, batch: Any, apart: bool = True, max_rows: float = math.inf, windows: bool = False
    ) -> "LinkedBatch | None":
        """What a `ScheduleBatch` about to run needs, or None if SGLang's description will do.

        In a prefill batch with rows that are not ordinary, the ordinary ones take the link path as well unless they are
        to be computed `apart`. SGLang's attention is given `max_rows` at most; 0: it can compute none.
        windows: whether some layer has one.
        """
        states = [lazy_state(req) for req in batch.reqs]
        linked = [state for state in states if isinstance(state, LinkedRequest)]
        if batch.forward_mode.is_decode_or_idle():
            ours = any(state.segments or windows and not state.row.in_order for state in linked)
            return cls() if ours or max_rows == 0 else None
        cut = any(isinstance(state, Fill) and not state.row.is_sequence for state in states)
        if not cut and max_rows and all(state.recomputes for state in linked):
            return None
        rows = [
            row
            for i, lens in enumerate(zip(batch.prefix_lens, batch.extend_lens, strict=True))
            for row in AttentionRow.of(i, states[i], *lens, windows)
        ]
        all_ordinary = all(row.ordinary for row in rows)
        if all_ordinary and not cut and max_rows:
            return None
        apart = (apart or all_ordinary) and len(rows) <= max_rows
        return cls(rows, [i for i, row in enumerate(rows) if not (row.ordinary and apart)])


def windows_of(rows: Sequence[AttentionRow], places: np.ndarray) -> list[np.ndarray]:
    """The windows of rows whose KV tokens go to `places`: of each its request, start, length and place."""
    windows = []
    for row, place in zip(rows, places.tolist(), strict=True):
        for start, end in row.windows:
            windows.append((row.request, start, end - start, place))
            place += end - start
    return list(np.array(windows).T)

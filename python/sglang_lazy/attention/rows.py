"""How attention takes a batch: a row for each sequence of new tokens that see the same KV tokens."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_lazy.core.state import Fill, LinkedRequest, lazy_state


class AttentionRow(NamedTuple):
    """New tokens of a prefill batch that follow one another and see the same KV tokens.

    Those of one request, or of one of the chunks that a fill computes.

    request: the place of the request in the batch.
    windows: the ranges of the request's row that hold the KV tokens, in order; the new ones are the last.
    positions: int32 [number of KV tokens].
    num_new: how many of them are to be computed.
    ordinary: whether each token sees all KV tokens before it and none after, and no segments.
    """

    request: int
    windows: Sequence[tuple[int, int]]
    positions: np.ndarray
    num_new: int
    ordinary: bool

    @property
    def prefix_len(self) -> int:
        return len(self.positions) - self.num_new

    @classmethod
    def of(
        cls, request: int, state: LinkedRequest | Fill | None, prefix_len: int, extend_len: int
    ) -> list["AttentionRow"]:
        """The rows of a request that computes `extend_len` tokens behind the first `prefix_len` of its row."""
        row_len = prefix_len + extend_len
        if isinstance(state, Fill) and has_several_chunks(state):
            return [
                cls(request, windows, np.arange(length, dtype=np.int32), num_new, ordinary=True)
                for windows, length, num_new in state.row.parts(prefix_len, row_len)
            ]
        if not isinstance(state, LinkedRequest):
            return [cls(request, [(0, row_len)], np.arange(row_len, dtype=np.int32), extend_len, ordinary=True)]
        positions = state.row.positions_of(0, row_len)
        in_order = np.array_equal(positions[prefix_len:], np.arange(prefix_len, row_len))
        return [cls(request, [(0, row_len)], positions, extend_len, ordinary=in_order and not state.segments)]


def has_several_chunks(state: LinkedRequest | Fill | None) -> bool:
    """Whether attention has a row for each of several chunks that a request computes."""
    return isinstance(state, Fill) and len(state.chunks) > 1


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
    def of(cls, batch: Any, apart: bool = True, max_rows: float = math.inf) -> "LinkedBatch | None":
        """What a `ScheduleBatch` about to run needs, or None if SGLang's description will do.

        In a prefill batch with rows that are not ordinary, the ordinary ones take the link path as well unless they are
        to be computed `apart`. SGLang's attention is given `max_rows` at most.
        """
        states = [lazy_state(req) for req in batch.reqs]
        if batch.forward_mode.is_decode_or_idle():
            return cls() if any(isinstance(state, LinkedRequest) and state.segments for state in states) else None
        cut = any(map(has_several_chunks, states))
        if not cut and not any(isinstance(state, LinkedRequest) for state in states):
            return None
        rows = [
            row
            for i, lens in enumerate(zip(batch.prefix_lens, batch.extend_lens, strict=True))
            for row in AttentionRow.of(i, states[i], *lens)
        ]
        all_ordinary = all(row.ordinary for row in rows)
        if all_ordinary and not cut:
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

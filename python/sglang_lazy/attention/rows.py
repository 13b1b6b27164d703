"""The rows that attention splits a batch into: sequences of new tokens that see the same KV tokens."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sglang_lazy.core.fills import Fill
from sglang_lazy.core.prompt import positions_in
from sglang_lazy.core.state import LinkedRequest, Probe, Undecided

T = TypeVar("T")

MIN_TABLE_WIDTH, MAX_TABLE_SIZE = 8192, 1 << 25
"""Of slots listed for SGLang's attention: the least room for each row, and the most for all, 128 MiB. Each row takes as
much as the longest: one long prompt beside a thousand short chunks would take hundreds of MiB."""


def table_width(row_lens: Iterable[int]) -> int:
    """The room for each of these rows: a power of two, since SGLang's Triton kernels are compiled for each width."""
    return max(MIN_TABLE_WIDTH, 1 << (max(row_lens) - 1).bit_length())


class Pass(NamedTuple):
    """The requests of a forward pass, in order.

    states: what they carry, see `lazy_state`.
    prefix_lens, extend_lens: of each row, how many tokens it has before the pass and how many the pass computes; None
        in decode, which computes one.
    """

    states: Sequence[LinkedRequest | Undecided | Fill | None]
    prefix_lens: Sequence[int] | None = None
    extend_lens: Sequence[int] | None = None


class AttentionRow(NamedTuple):
    """Consecutive new tokens of a prefill batch that see the same KV tokens: those of one request, or of one part of a
    fill (a chunk or the preamble).

    request: index of the request in the batch.
    ranges: those of the request's row that hold the KV tokens, in order; the new tokens come last.
    positions: int32 [number of KV tokens].
    num_new: how many of them to compute.
    ordinary: whether this is causal attention, with or without a window, and no segments.
    probe: receives the attention of its last tokens, if its request is such a probe.
    """

    request: int
    ranges: Sequence[tuple[int, int]]
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
        """The rows of a request that computes `extend_len` tokens after the first `prefix_len` of its row.

        windows: whether any layer has a window, for which the order of the cached tokens matters, too.
        """
        row_len = prefix_len + extend_len
        if isinstance(state, Fill) and not state.row.is_sequence:
            return [
                cls(request, ranges, positions_in([(0, sum(end - start for start, end in ranges))]), num_new, True)
                for ranges, num_new in state.row.parts(prefix_len, row_len)
            ]
        if not isinstance(state, LinkedRequest) or state.recomputes:
            return [cls(request, [(0, row_len)], positions_in([(0, row_len)]), extend_len, ordinary=True)]
        positions = state.row.positions_of(0, row_len)
        known = 0 if windows else prefix_len
        ordinary = not state.segments and np.array_equal(positions[known:], np.arange(known, row_len))
        probe = state.probe if "attention" in state.policy.probes else None
        listed = [(0, row_len)]
        if not ordinary:
            num_linked = sum(chunk.num_kept for chunk in state.segments)
            listed, positions = _in_position_order(positions, num_linked, prefix_len)
        return [cls(request, listed, positions, extend_len, ordinary, probe)]


def _in_position_order(positions: np.ndarray, start: int, end: int) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The ranges of a row that list its tokens [start, end), the cached text, by position, as kernels need it; and the
    positions of all tokens in that order.

    In the row itself, copies of chunks come before text that precedes these chunks in the prompt, and a span that was
    cached comes before an earlier one whose KV had been evicted and is computed again.
    """
    if end - start < 2 or (np.diff(positions[start:end]) > 0).all():
        return [(0, len(positions))], positions
    order = start + positions[start:end].argsort()
    cuts = np.flatnonzero(np.diff(order) != 1) + 1
    ranges = [(int(part[0]), int(part[-1]) + 1) for part in np.split(order, cuts)]
    positions = np.concatenate([positions[:start], positions[order], positions[end:]])
    return [(0, start)] * (start > 0) + [*ranges, (end, len(positions))], positions


@dataclasses.dataclass(frozen=True)
class LinkedBatch:
    """A batch for which SGLang's own description is not enough. Empty in decode, where a row sees all its KV tokens.

    rows: the new tokens by row, in order.
    linked: the indices of the rows that take the link path, ascending; the others are ordinary.
    """

    rows: Sequence[AttentionRow] = ()
    linked: Sequence[int] = ()
    _prepared: list[Any] = dataclasses.field(default_factory=list, init=False, compare=False, repr=False)

    def prepared(self, prepare: Callable[[], T]) -> T:
        """The result of `prepare()`, computed once for all passes of the batch: the model's and that of its draft."""
        if not self._prepared:
            self._prepared.append(prepare())
        return self._prepared[0]

    @functools.cached_property
    def q_positions(self) -> np.ndarray:
        """The positions of the new tokens, int64."""
        return np.concatenate([row.positions[row.prefix_len :] for row in self.rows], dtype=np.int64)

    @classmethod
    def of(
        cls, current: Pass, separate: bool = True, max_rows: float = math.inf, windows: bool = False
    ) -> "LinkedBatch | None":
        """The description of a pass about to run, or None if SGLang's own will do.

        separate: whether SGLang's attention computes the ordinary rows of a mixed prefill batch; otherwise all rows
            take the link path.
        max_rows: the most rows that SGLang's attention can take; 0 if it cannot compute this model.
        windows: whether any layer has a window.
        """
        states, prefix_lens, extend_lens = current
        linked = [state for state in states if isinstance(state, LinkedRequest)]
        if prefix_lens is None or extend_lens is None:
            ours = any(state.segments or windows and not state.row.keeps_order for state in linked)
            return cls() if ours or max_rows == 0 else None
        cut = any(isinstance(state, Fill) and not state.row.is_sequence for state in states)
        if not cut and max_rows and all(state.recomputes for state in linked):
            return None
        rows = [
            row
            for i, lens in enumerate(zip(prefix_lens, extend_lens, strict=True))
            for row in AttentionRow.of(i, states[i], *lens, windows)
        ]
        all_ordinary = all(row.ordinary for row in rows)
        if all_ordinary and not cut and max_rows:
            return None
        table_size = len(rows) * table_width(len(row.positions) if row.ordinary else row.num_new for row in rows)
        separate = (separate or all_ordinary) and len(rows) <= max_rows and table_size <= MAX_TABLE_SIZE
        return cls(rows, [i for i, row in enumerate(rows) if not (row.ordinary and separate)])


def row_ranges(rows: Sequence[AttentionRow], places: np.ndarray) -> list[np.ndarray]:
    """The ranges of rows, for copying their slots to `kv_indices`: request, start, length and destination of each.

    places: int64, where each row's KV tokens begin in `kv_indices`.
    """
    ranges = []
    for row, place in zip(rows, places.tolist(), strict=True):
        for start, end in row.ranges:
            ranges.append((row.request, start, end - start, place))
            place += end - start
    return list(np.array(ranges).T)


class StockRows(NamedTuple):
    """The rows of a batch as they are shown to attention that knows no segments: each a row of a table, in order.

    prefix_lens, extend_lens: int64, of each row, before the pass and computed in it.
    ranges: for copying their slots to the table, see `row_ranges`.  width: of the table.
    """

    prefix_lens: np.ndarray
    extend_lens: np.ndarray
    ranges: list[np.ndarray]
    width: int

    @classmethod
    def of(cls, current: LinkedBatch) -> "StockRows":
        """All rows of `current`. Linked ones cannot be left out, since the new tokens of all rows are contiguous; their
        results are replaced later. To make them cheap, they attend only to their new tokens."""
        linked = set(current.linked)
        rows = [
            row._replace(ranges=[(0, row.num_new)], positions=row.positions[: row.num_new]) if i in linked else row
            for i, row in enumerate(current.rows)
        ]
        prefix_lens, extend_lens = np.array([(row.prefix_len, row.num_new) for row in rows]).T
        width = table_width((prefix_lens + extend_lens).tolist())
        return cls(prefix_lens, extend_lens, row_ranges(rows, np.arange(len(rows)) * width), width)

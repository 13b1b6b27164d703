"""What the rows of a decode step are copied from: tables of all rows that a server holds, and the step's queries.

Tables are checked once, as they are made, and may be written to in place.
"""

import dataclasses
import functools

import torch

from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.validation import INTEGERS, check_tensor, check_window

INT32 = (torch.int32,)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowTables:
    """All tokens of each row, and its segments; see `whole_rows`.

    req_to_token: [num_rows, width] int32, the slot of each token of a row.
    num_segments: [num_rows] int32, with any stride.
    segment_ends, segment_offsets, segment_ids: [num_rows, max_segments] int32, see `Rows`.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """

    req_to_token: torch.Tensor
    num_segments: torch.Tensor
    segment_ends: torch.Tensor
    segment_offsets: torch.Tensor
    segment_ids: torch.Tensor

    def __post_init__(self) -> None:
        of_segments = _check_common(self)
        check_tensor("segment_ends", self.segment_ends, of_segments, INT32, self.device)
        check_tensor("segment_ids", self.segment_ids, of_segments, INT32, self.device)

    @functools.cached_property
    def device(self) -> torch.device:
        return self.req_to_token.device


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class WindowTables:
    """What a window may contain of each row; see `window_rows`.

    A query's window contains the last `window` positions. The row's tail consists of the tokens that a window may
    contain and that are in segments or whose index differs from their position.

    req_to_token, num_segments, segment_offsets: see `RowTables`.
    tail_indices, tail_positions: [num_rows, max_tail] int32, the indices of the tail's tokens in the row, ascending,
        and their positions, at least -2**31 + window; entries with a lower position are ignored.
    tail_ends: [num_rows, max_segments] int32, the end of each segment among the entries of the tail.
    window_slots: [num_slots] int64, of each slot that to list in its place; None for the slot itself.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """

    req_to_token: torch.Tensor
    num_segments: torch.Tensor
    segment_offsets: torch.Tensor
    tail_ends: torch.Tensor
    tail_indices: torch.Tensor
    tail_positions: torch.Tensor
    window: int
    window_slots: torch.Tensor | None = None

    def __post_init__(self) -> None:
        device = self.device
        num_rows, max_segments = _check_common(self)
        check_tensor("tail_ends", self.tail_ends, (num_rows, max_segments), INT32, device)
        check_tensor("tail_indices", self.tail_indices, (num_rows, None), INT32, device)
        check_tensor("tail_positions", self.tail_positions, self.tail_indices.shape, INT32, device)
        if self.window_slots is not None:
            check_tensor("window_slots", self.window_slots, (None,), (torch.int64,), device)
        check_window(self.window)

    @functools.cached_property
    def device(self) -> torch.device:
        return self.req_to_token.device


def _check_common(tables: RowTables | WindowTables) -> torch.Size:
    """Check what both have. Returns the shape of what each segment has."""
    device = tables.device
    check_tensor("req_to_token", tables.req_to_token, (None, None), INT32, device)
    num_rows = tables.req_to_token.shape[0]
    check_tensor("num_segments", tables.num_segments[:, None], (num_rows, 1), INT32, device)
    check_tensor("segment_offsets", tables.segment_offsets, (num_rows, None), INT32, device)
    return tables.segment_offsets.shape


@dataclasses.dataclass(frozen=True, eq=False)
class Queries:
    """The queries of a decode step: of each request one for each token of a chain, each of which sees one token more
    than that before it. The queries of a request follow one another.

    places: [bs] int64, the row of each request in the tables.
    seq_lens: [bs] int32 or int64, how many tokens it has there.
    first: how many tokens more than `seq_lens` the first query of a request sees; at least one in any case, since a
        request that pads a batch has one.
    num_queries: of each request.
    Raises ValueError on a shape, dtype or device mismatch.
    """

    places: torch.Tensor
    seq_lens: torch.Tensor
    first: int = 0
    num_queries: int = 1

    def __post_init__(self) -> None:
        device = self.places.device
        check_tensor("places", self.places, (None,), (torch.int64,), device)
        check_tensor("seq_lens", self.seq_lens, self.places.shape, INTEGERS, device)

    @functools.cached_property
    def total(self) -> int:
        """The queries of all requests."""
        return self.places.shape[0] * self.num_queries

    def seen(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many tokens each query sees, [total].  seq_lens: [bs], of these queries, on any device."""
        chain = torch.arange(self.first, self.first + self.num_queries, device=seq_lens.device)
        return (seq_lens[:, None] + chain).clamp(min=1).flatten()


def check_listing(rows: Rows, tables: RowTables | WindowTables, queries: Queries) -> None:
    """Check that rows have room for each query and for its segments. Done for each call."""
    device = rows.device
    if tables.device != device:
        raise ValueError(f"tables: expected device {device}, got {tables.device}")
    if queries.places.device != device:
        raise ValueError(f"queries: expected device {device}, got {queries.places.device}")
    if rows.bs != queries.total:
        raise ValueError(f"rows: expected as many as queries, {queries.total}, got {rows.bs}")
    if rows.max_segments != (expected := tables.segment_offsets.shape[1]):
        raise ValueError(f"rows: expected room for {expected} segments, got {rows.max_segments}")
    whole = isinstance(tables, RowTables)
    if whole != (rows.segment_ids is not None):
        raise ValueError(f"segment_ids: expected {'a tensor' if whole else 'None, in a window'}, got the other")

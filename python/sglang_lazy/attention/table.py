"""The segment table: the segments of each row of `req_to_token`, on the device."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_lazy.attention.probes import AllReduce, ProbeSums, deviating_layer, measure, probed_layers
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.core.device import to_device
from sglang_lazy.core.model import DecodePlan, ServedModel
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.request import Request
from sglang_lazy.core.state import as_linked, linked

NOWHERE = np.iinfo(np.int32).min
"""A position that no token has."""


class SegmentTable:
    """A companion of `req_to_token` with the segments at the beginning of each row.

    num_segments: int32 [num_rows].
    ends: int32 [num_rows, max_segments], where each segment ends in the row.
    offsets: int32 [num_rows, max_segments], positions in the prompt minus those that the segment's keys are rotated
        for, as an index into `LayerRope.cos_sin_cache`.
    ids: int32 [num_rows, max_segments], equal for segments that list the same slots.
    tail_indices, tail_positions: int32 [num_rows, the longest window or 0], the row indices and positions of the
        prompt's last tokens, those that a window may reach in decode, in row order. All positions are NOWHERE if the
        tail is text whose row indices equal its positions.
    tail_ends: int32 [num_rows, max_segments, or 0 without windows], where each segment ends within the tail.
    batch_type: describes a batch to the attention that reads chunks: `LinkedBatch`, `CrossBatch` or
        `UnrotatedBatch`.
    linked_rows: the rows that have an entry here; an entry stays until the row is assigned again.
    stock_attends: whether SGLang's own attention can compute this model; otherwise all rows take the link path.
    model: the served model.
    has_chunks: whether the batch of the current forward pass computes chunks or attends to them.
    current: that batch, of type `batch_type`; None if SGLang's description will do. Ambient, since SGLang builds a
        `ForwardBatch` and runs it in one call, without fields that a plugin could fill.
    last: what `current` was in the pass before; the pass of a draft that follows has the same rows.
    probes: what the current pass measures, or None.
    last_layer: the layer whose keys end the current pass, or None if it runs the whole model.
    loads: what loads chunks from the host, which attention waits for; None without a host tier.
    recurrent: the recurrent layers of the model; None if it has none.
    drafter: SGLang's runner of the model that drafts, if it has KV of its own, in the same slots; None without one.
    workspaces: of decode, by plan: one for all passes that have it, the model's and its draft's.
    """

    def __init__(
        self,
        num_rows: int,
        max_segments: int,
        device: str | torch.device,
        model: ServedModel,
        batch_type: Any = LinkedBatch,
        stock_attends: bool = True,
    ):
        tail = max(model.windows, default=0)
        # One record per row, so that a batch is written in one copy.
        widths = [1, max_segments, max_segments, max_segments, max_segments if tail else 0, tail, tail]
        edges = itertools.accumulate(widths, initial=0)
        self._columns = [slice(start, end) for start, end in itertools.pairwise(edges)]
        self._records = torch.zeros(num_rows, sum(widths), dtype=torch.int32, device=device)
        num_segments, *of_segments = self._parts(self._records)
        self.num_segments = num_segments[:, 0]
        self.ends, self.offsets, self.ids, self.tail_ends, self.tail_indices, self.tail_positions = of_segments
        self.tail_positions.fill_(NOWHERE)
        self.model, self.batch_type = model, batch_type
        self.stock_attends = stock_attends
        self.has_chunks = False
        self.current: Any = None
        self.last: Any = None
        self.probes: ProbeSums | None = None
        self.last_layer: int | None = None
        self.loads: Any = None
        self.recurrent: Any = None
        self.drafter: Any = None
        self.workspaces: dict[DecodePlan, torch.Tensor] = {}
        self.linked_rows: set[int] = set()

    @property
    def max_segments(self) -> int:
        return self.ends.shape[1]

    def _parts(self, records: Any) -> list[Any]:
        """The columns of each part of these records, a tensor or an array: the number of segments, their ends, offsets
        and ids, then the tail's ends, indices and positions."""
        return [records[:, columns] for columns in self._columns]

    def assign(
        self,
        rows: Mapping[int, Sequence[ChunkSlice]],
        ids: Mapping[int, Sequence[int]],
        orders: Mapping[int, np.ndarray],
    ) -> None:
        """Write the segments of newly assigned rows, in stream order with the writes of `req_to_token`.

        rows: the slices in each row.  ids: their `ChunkStore.segment_id`, for rows that have any.
        orders: int32, for rows that may not be in position order, the position of each token of the prompt.
        """
        orders = orders if self.tail_positions.shape[1] else {}  # without windows, order does not matter
        changed = {row: chunks for row, chunks in rows.items() if chunks or row in orders or row in self.linked_rows}
        if not changed:
            return
        records = np.zeros((len(changed), self._records.shape[1]), dtype=np.int32)
        num_segments, ends, offsets, segment_ids, tail_ends, tail_indices, tail_positions = self._parts(records)
        tail_positions[:] = NOWHERE
        for i, (row, chunks) in enumerate(changed.items()):
            (self.linked_rows.add if chunks or row in orders else self.linked_rows.discard)(row)
            num_segments[i] = count = len(chunks)
            ends[i, :count] = [*itertools.accumulate([chunk.num_kept for chunk in chunks])]
            offsets[i, :count] = self.model.rotations([chunk.offset for chunk in chunks])
            segment_ids[i, :count] = ids.get(row, ())
            if row in orders:
                tail = np.flatnonzero(orders[row] >= len(orders[row]) - tail_positions.shape[1])
                if tail[0] >= ends[i].max() and (orders[row][tail] == tail).all():
                    tail = tail[:0]  # text in order, as all that is generated is
                tail_indices[i, : len(tail)], tail_positions[i, : len(tail)] = tail, orders[row][tail]
                tail_ends[i, :count] = np.searchsorted(tail, ends[i, :count])
        index = np.fromiter(changed, dtype=np.int64, count=len(changed))
        device = self._records.device
        self._records.index_copy_(0, to_device(index, device), to_device(records, device))

    @contextlib.contextmanager
    def running(self, batch: Any, probes: ProbeSums | None = None, last_layer: int | None = None) -> Iterator[None]:
        """Make a batch with chunks the current one during its forward pass or a graph capture.

        batch: of `batch_type`, or None.
        """
        self.has_chunks, self.current, self.probes, self.last_layer = True, batch, probes, last_layer
        try:
            yield
        finally:
            self.has_chunks, self.current, self.probes, self.last_layer = False, None, None, None
            self.last = batch


def table_of(req_to_token_pool: Any) -> SegmentTable | None:
    """The segment table of a `ReqToTokenPool`, or None if chunks are not served."""
    return getattr(req_to_token_pool, "segment_table", None)


@contextlib.contextmanager
def measuring(
    table: SegmentTable,
    current: Any,
    reqs: Sequence[Request],
    unfinished: Request | None,
    rows: Any,
    all_reduce: AllReduce,
) -> Iterator[None]:
    """A context for the forward pass of a batch: make `current` the table's batch, and take the measurements of probes.

    reqs: of the batch.  unfinished: the one of these whose prompt does not end with it.  rows: the cache's `RowCache`.
    """
    probes = [req for req in reqs if (state := linked(req)) is not None and state.probe is not None]
    sums = ProbeSums.of(current, probed_layers(table.model.layers), table.ends.device) if probes else None
    partial = any(as_linked(req).recomputes for req in probes)
    with table.running(current, sums, deviating_layer(table.model) if partial else None):
        yield
    if sums is not None:
        sums.deliver(reqs, all_reduce)
    for req in probes:
        if req is not unfinished:
            measure(req, rows.requests.nodes(req).chunks, table.model, rows, all_reduce)

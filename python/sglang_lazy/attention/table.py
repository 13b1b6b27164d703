"""The segments of each row of `req_to_token`, on the device."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sglang_lazy.attention.probes import ProbeSums
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.core.device import to_device
from sglang_lazy.core.model import ServedModel
from sglang_lazy.core.prompt import ChunkSlice


class SegmentTable:
    """Companion of `req_to_token`: per row, the chunk segments at its beginning.

    num_segments: int32 [num_rows].
    ends: int32 [num_rows, max_segments], where each segment ends in the row.
    offsets: int32 [num_rows, max_segments], by how much positions in the prompt exceed those that each segment's keys
        are stored at, as an index into `LayerRope.cos_sin_cache`.
    ids: int32 [num_rows, max_segments], equal for segments that list the same slots.
    batch_type: what describes a batch to the attention that reads chunks.
    linked_rows: the rows with segments. A row stays until its next request gets it.
    model: what policies see of the served model.
    has_chunks: whether the batch of the current forward pass has chunks, to compute or to attend to.
    current: what attention has to know of it; None where SGLang's description will do. SGLang builds a `ForwardBatch`
        and runs it in one call, without fields that a plugin could fill.
    probes: what is measured in it, or None.
    """

    def __init__(
        self,
        num_rows: int,
        max_segments: int,
        device: str | torch.device,
        model: ServedModel,
        batch_type: Any = LinkedBatch,
    ):
        # One record for each row, so that a batch is written in one copy.
        self._records = torch.zeros(num_rows, 1 + 3 * max_segments, dtype=torch.int32, device=device)
        self.num_segments = self._records[:, 0]
        self.ends, self.offsets, self.ids = self._records[:, 1:].chunk(3, dim=1)
        self.model, self.batch_type = model, batch_type
        self.has_chunks = False
        self.current: Any = None
        self.probes: ProbeSums | None = None
        self.linked_rows: set[int] = set()

    @property
    def max_segments(self) -> int:
        return self.ends.shape[1]

    def assign(self, rows: Mapping[int, Sequence[ChunkSlice]], segment_id: Callable[[ChunkSlice], int]) -> None:
        """Enter the segments of rows that were given to requests, in stream order with the writes of `req_to_token`.

        segment_id: see `ChunkStore.segment_id`.
        """
        changed = {row: chunks for row, chunks in rows.items() if chunks or row in self.linked_rows}
        if not changed:
            return
        records = np.zeros((len(changed), self._records.shape[1]), dtype=np.int32)
        for record, (row, chunks) in zip(records, changed.items(), strict=True):
            record[0] = count = len(chunks)
            ends, offsets, ids = record[1:].reshape(3, -1)
            ends[:count] = [*itertools.accumulate([chunk.num_kept for chunk in chunks])]
            offsets[:count] = self.model.rotations([chunk.offset for chunk in chunks])
            ids[:count] = [*map(segment_id, chunks)]
            (self.linked_rows.add if chunks else self.linked_rows.discard)(row)
        index = np.fromiter(changed, dtype=np.int64, count=len(changed))
        device = self._records.device
        self._records.index_copy_(0, to_device(index, device), to_device(records, device))

    @contextlib.contextmanager
    def running(self, batch: Any, probes: ProbeSums | None = None) -> Iterator[None]:
        """During one forward pass, or one graph capture, of a batch with chunks, make it the current one.

        batch: of `batch_type`, or None.
        """
        self.has_chunks, self.current, self.probes = True, batch, probes
        try:
            yield
        finally:
            self.has_chunks, self.current, self.probes = False, None, None


def table_of(req_to_token_pool: Any) -> SegmentTable | None:
    """The table beside a `ReqToTokenPool`, or None where chunks are not served."""
    return getattr(req_to_token_pool, "segment_table", None)

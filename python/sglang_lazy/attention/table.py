"""The segments of each row of `req_to_token`, on the device, and what the forward pass under way needs of its batch."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_lazy.cache.prompt import ChunkRef


class LinkedBatch(NamedTuple):
    """Positions in a batch with linked rows; both None in decode, where a row sees all its entries.

    q_positions: int64 [nnz_qo], of the rows to compute.
    kv_positions: int32 [nnz_kv], of all entries of all rows, in row order.
    """

    q_positions: np.ndarray | None = None
    kv_positions: np.ndarray | None = None

    @classmethod
    def of(cls, batch) -> "LinkedBatch | None":
        """What a `ScheduleBatch` about to run needs, or None if none of its requests is linked."""
        links = [getattr(req, "link", None) for req in batch.reqs]
        if not any(links):
            return None
        if batch.forward_mode.is_decode_or_idle():
            return cls()
        rows, computed = [], []
        for link, prefix_len, extend_len in zip(links, batch.prefix_lens, batch.extend_lens, strict=True):
            end = prefix_len + extend_len
            positions = np.arange(end, dtype=np.int32) if link is None else link.row.positions_of(0, end)
            rows.append(positions)
            computed.append(positions[prefix_len:])
        return cls(np.concatenate(computed).astype(np.int64), np.concatenate(rows))


class SegmentTable:
    """Companion of `req_to_token`: per row, the chunk segments at its beginning.

    num_segments: int32 [num_rows].
    ends: int32 [num_rows, max_segments], where each segment ends in the row.
    offsets: int32 [num_rows, max_segments], the position of each segment's first token.
    current: the linked batch that the forward pass under way computes, None for an ordinary one. SGLang builds a
        `ForwardBatch` and runs it in one call, without fields that a plugin could fill.
    """

    def __init__(self, num_rows: int, max_segments: int, device: str):
        self.num_segments = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.ends = torch.zeros(num_rows, max_segments, dtype=torch.int32, device=device)
        self.offsets = torch.zeros_like(self.ends)
        self.current: LinkedBatch | None = None
        self._linked_rows: set[int] = set()

    def assign(self, rows: Mapping[int, Sequence[ChunkRef]]) -> None:
        """Enter the chunk segments of rows that were given to requests; ordered with the writes of `req_to_token`."""
        changed = {row: chunks for row, chunks in rows.items() if chunks or row in self._linked_rows}
        if not changed:
            return
        width = max(len(chunks) for chunks in changed.values())
        fields = np.zeros((len(changed), 2 + 2 * width), dtype=np.int64)
        for line, (row, chunks) in zip(fields, changed.items(), strict=True):
            line[0], line[1] = row, len(chunks)
            line[2 : 2 + len(chunks)] = np.cumsum([chunk.used for chunk in chunks])
            line[2 + width : 2 + width + len(chunks)] = [chunk.start for chunk in chunks]
            (self._linked_rows.add if chunks else self._linked_rows.discard)(row)
        fields = to_device(fields, self.num_segments.device)
        index, values = fields[:, 0], fields[:, 1:].to(torch.int32)
        self.num_segments[index] = values[:, 0]
        self.ends[index, :width] = values[:, 1 : 1 + width]
        self.offsets[index, :width] = values[:, 1 + width :]

    @contextlib.contextmanager
    def running(self, batch: LinkedBatch | None) -> Iterator[None]:
        """For the time of one forward pass, or of one graph capture, make `batch` the current one."""
        self.current = batch
        try:
            yield
        finally:
            self.current = None


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`, in stream order; from pageable memory it could wait for what runs there."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def table_of(req_to_token_pool) -> SegmentTable | None:
    """The table beside a `ReqToTokenPool`, or None where chunks are not served."""
    return getattr(req_to_token_pool, "segment_table", None)

"""The segments of each row of `req_to_token`, on the device, and what the forward pass under way needs of its batch."""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_lazy.cache.prompt import ChunkRef


class LinkedBatch(NamedTuple):
    """What a forward pass has to know of a batch with linked rows; nothing in decode, where a row sees all its entries.

    requests: the places in the batch of the requests that need the link path, ascending; the others are ordinary.
    q_positions: int64 [nnz_qo], of the rows to compute, of all requests.
    kv_positions: int32 [nnz_kv], of all entries of the rows of `requests`, one request behind the other.
    """

    requests: Sequence[int] = ()
    q_positions: np.ndarray | None = None
    kv_positions: np.ndarray | None = None

    @classmethod
    def of(cls, batch, apart: bool = True) -> "LinkedBatch | None":
        """What a `ScheduleBatch` about to run needs, or None if all its requests are ordinary.

        That is one without segments, each of whose rows to compute sees all entries before it, and none after. In a
        prefill batch with others, ordinary ones take the link path as well unless they are to be computed `apart`.
        """
        links = [getattr(req, "link", None) for req in batch.reqs]
        if not any(links):
            return None
        if batch.forward_mode.is_decode_or_idle():
            return cls() if any(link is not None and link.segments for link in links) else None
        requests, computed, entries, all_ordinary = [], [], [], True
        for i, (link, prefix_len, extend_len) in enumerate(
            zip(links, batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            row_len = prefix_len + extend_len
            positions = link.row.positions_of(0, row_len) if link is not None else np.arange(row_len, dtype=np.int32)
            computed.append(positions[prefix_len:])
            ordinary = link is None or (
                not link.segments and np.array_equal(positions[prefix_len:], np.arange(prefix_len, row_len))
            )
            all_ordinary = all_ordinary and ordinary
            if not (ordinary and apart):
                requests.append(i)
                entries.append(positions)
        if all_ordinary:
            return None
        return cls(requests, np.concatenate(computed, dtype=np.int64), np.concatenate(entries))


class SegmentTable:
    """Companion of `req_to_token`: per row, the chunk segments at its beginning.

    num_segments: int32 [num_rows].
    ends: int32 [num_rows, max_segments], where each segment ends in the row.
    offsets: int32 [num_rows, max_segments], the position of each segment's first token.
    linked_rows: the rows with segments; one stays until its next request gets it.
    has_chunks: whether the batch that the forward pass under way computes has chunks, to compute or to attend to.
    current: what the pass has to know of linked rows, None if there are none. SGLang builds a `ForwardBatch` and runs
        it in one call, without fields that a plugin could fill.
    """

    def __init__(self, num_rows: int, max_segments: int, device: str):
        # One line for each row, so that a batch is written in one copy.
        self._lines = torch.zeros(num_rows, 1 + 2 * max_segments, dtype=torch.int32, device=device)
        self.num_segments = self._lines[:, 0]
        self.ends, self.offsets = self._lines[:, 1:].chunk(2, dim=1)
        self.has_chunks = False
        self.current: LinkedBatch | None = None
        self.linked_rows: set[int] = set()

    def assign(self, rows: Mapping[int, Sequence[ChunkRef]]) -> None:
        """Enter the chunk segments of rows that were given to requests; ordered with the writes of `req_to_token`."""
        changed = {row: chunks for row, chunks in rows.items() if chunks or row in self.linked_rows}
        if not changed:
            return
        lines = np.zeros((len(changed), self._lines.shape[1]), dtype=np.int32)
        max_segments = self.ends.shape[1]
        for line, (row, chunks) in zip(lines, changed.items(), strict=True):
            line[0] = len(chunks)
            line[1 : 1 + len(chunks)] = [*itertools.accumulate(chunk.used for chunk in chunks)]
            line[1 + max_segments : 1 + max_segments + len(chunks)] = [chunk.start for chunk in chunks]
            (self.linked_rows.add if chunks else self.linked_rows.discard)(row)
        index = np.fromiter(changed, dtype=np.int64, count=len(changed))
        self._lines.index_copy_(0, to_device(index, self._lines.device), to_device(lines, self._lines.device))

    @contextlib.contextmanager
    def running(self, batch: LinkedBatch | None) -> Iterator[None]:
        """During one forward pass, or one graph capture, of a batch with chunks, make it the current one."""
        self.has_chunks, self.current = True, batch
        try:
            yield
        finally:
            self.has_chunks, self.current = False, None


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `array` on `device`, in stream order; from pageable memory it could wait for what runs there."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def table_of(req_to_token_pool) -> SegmentTable | None:
    """The table beside a `ReqToTokenPool`, or None where chunks are not served."""
    return getattr(req_to_token_pool, "segment_table", None)

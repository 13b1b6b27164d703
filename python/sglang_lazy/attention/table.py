"""The segments of each row of `req_to_token`, on the device, and what the forward pass under way needs of its batch."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sglang_lazy.core.prompt import ChunkRef


class AttentionRow(NamedTuple):
    """Tokens to compute of a prefill batch that stand one behind the other and see the same entries.

    Those of one request, or of one of the chunks that a fill computes.

    request: the place of the request in the batch.
    windows: the ranges of the request's row that hold the entries, in order; those to compute are the last.
    positions: int32 [number of entries].
    num_new: how many of them are to be computed.
    ordinary: whether each token sees all entries before it and none after, and no segments.
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
    def of(cls, request: int, req, prefix_len: int, extend_len: int) -> list["AttentionRow"]:
        """The rows of a request that computes `extend_len` tokens behind the first `prefix_len` of its row."""
        row_len = prefix_len + extend_len
        if is_cut(req):
            return [
                cls(request, windows, np.arange(length, dtype=np.int32), num_new, ordinary=True)
                for windows, length, num_new in req.fill.row.parts(prefix_len, row_len)
            ]
        link = getattr(req, "link", None)
        positions = np.arange(row_len, dtype=np.int32) if link is None else link.row.positions_of(0, row_len)
        ordinary = link is None or (
            not link.segments and np.array_equal(positions[prefix_len:], np.arange(prefix_len, row_len))
        )
        return [cls(request, [(0, row_len)], positions, extend_len, ordinary)]


def is_cut(req) -> bool:
    """Whether attention has a row for each of several chunks that `req` computes."""
    fill = getattr(req, "fill", None)
    return fill is not None and len(fill.chunks) > 1


class LinkedBatch(NamedTuple):
    """What attention has to know of a batch whose requests it cannot take as SGLang describes them.

    Nothing in decode, where a row sees all its entries.

    rows: how attention takes the tokens to compute, in their order.
    linked: the places in `rows` of those that take the link path, ascending; the others are ordinary.
    """

    rows: Sequence[AttentionRow] = ()
    linked: Sequence[int] = ()

    @property
    def q_positions(self) -> np.ndarray:
        """int64 [number of tokens to compute]."""
        return np.concatenate([row.positions[row.prefix_len :] for row in self.rows], dtype=np.int64)

    @classmethod
    def of(cls, batch, apart: bool = True, max_rows: float = math.inf) -> "LinkedBatch | None":
        """What a `ScheduleBatch` about to run needs, or None if SGLang's description will do.

        In a prefill batch with rows that are not ordinary, the ordinary ones take the link path as well unless they are
        to be computed `apart`. SGLang's attention is given `max_rows` at most.
        """
        links = [getattr(req, "link", None) for req in batch.reqs]
        if batch.forward_mode.is_decode_or_idle():
            return cls() if any(link is not None and link.segments for link in links) else None
        cut = any(is_cut(req) for req in batch.reqs)
        if not cut and not any(links):
            return None
        rows = [
            row
            for i, lens in enumerate(zip(batch.prefix_lens, batch.extend_lens, strict=True))
            for row in AttentionRow.of(i, batch.reqs[i], *lens)
        ]
        all_ordinary = all(row.ordinary for row in rows)
        if all_ordinary and not cut:
            return None
        apart = (apart or all_ordinary) and len(rows) <= max_rows
        return cls(rows, [i for i, row in enumerate(rows) if not (row.ordinary and apart)])


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

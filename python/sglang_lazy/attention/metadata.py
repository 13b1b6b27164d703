"""The rows of a batch for the kernels: indices and segments, copied from the live tables before the forward pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_kernel_lazy.rows import ExtendRows, Rows
from sglang_lazy.attention.rows import AttentionRow, LinkedBatch, row_ranges
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.device import ints_to_device, to_device

CopyRanges = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]
"""Copies slots to a tensor, which is int32: those of ranges, from `row_ranges`."""


def fill_segments(rows: Rows, places: torch.Tensor, seq_lens: torch.Tensor, table: SegmentTable) -> None:
    """Copy the segments of a decode batch from the live table, without synchronizing with the device.

    rows: written, but for its `kv_indices`.  places: [bs] int64, of the table.  seq_lens: [bs].
    """
    assert rows.segment_ids is not None
    torch.cumsum(seq_lens, 0, dtype=torch.int32, out=rows.kv_indptr[1:])
    torch.index_select(table.num_segments, 0, places, out=rows.num_segments)
    torch.index_select(table.ends, 0, places, out=rows.segment_ends)
    torch.index_select(table.offsets, 0, places, out=rows.segment_offsets)
    torch.index_select(table.ids, 0, places, out=rows.segment_ids)


class PrefillRows(NamedTuple):
    """A prefill batch's linked rows.

    rows: for layers that keep the KV of all tokens.  window_rows: for window layers with a pool of their own, if any.
    tokens: which of the batch's new tokens belong to these rows: indices, or a slice; None: all.
    """

    rows: ExtendRows
    window_rows: ExtendRows | None = None
    tokens: slice | torch.Tensor | None = None

    @classmethod
    def of(
        cls, current: LinkedBatch, pool_indices: torch.Tensor, table: SegmentTable, copy_ranges: CopyRanges
    ) -> "PrefillRows":
        """The linked rows of a batch.  pool_indices: [number of requests], the row of each in `req_to_token`."""
        device = table.ends.device
        extend_lens = np.array([row.num_new for row in current.rows])
        begins = extend_lens.cumsum() - extend_lens
        tokens = np.concatenate([np.arange(begins[i], begins[i] + extend_lens[i]) for i in current.linked])
        linked = [current.rows[i] for i in current.linked]
        kv_indptr = np.cumsum([0, *(len(row.positions) for row in linked)])
        qo_indptr = np.cumsum([0, *(row.num_new for row in linked)])
        on_device: list[Any] = ints_to_device(
            [
                kv_indptr,
                qo_indptr,
                current.q_positions[tokens],
                np.concatenate([row.positions for row in linked]),
                np.array([row.request for row in linked]),
                *row_ranges(linked, kv_indptr[:-1]),
            ],
            device,
        )
        kv_indptr, qo_indptr, q_positions, kv_positions, requests, *ranges = on_device
        kv_indices = torch.empty_like(kv_positions)
        copy_ranges(kv_indices, ranges)
        pool_rows = pool_indices[requests]
        rows = ExtendRows(
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            num_segments=table.num_segments[pool_rows],
            segment_ends=table.ends[pool_rows],
            segment_offsets=table.offsets[pool_rows],
            qo_indptr=qo_indptr,
            q_positions=q_positions,
            kv_positions=kv_positions,
            max_extend_len=max(row.num_new for row in linked),
        )
        window_rows, window_slots = None, table.model.window_slots
        if window_slots is not None:
            window_rows = dataclasses.replace(rows, kv_indices=window_slots[kv_indices].to(kv_indices.dtype))
        return cls(rows, window_rows, None if len(linked) == len(current.rows) else _selection(tokens, device))


def _selection(tokens: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Ascending indices, as a slice if they are consecutive."""
    first, last = int(tokens[0]), int(tokens[-1])
    consecutive = last - first == len(tokens) - 1
    return slice(first, last + 1) if consecutive else to_device(tokens.astype(np.int32), device)


def axes_of(positions: np.ndarray, listed: torch.Tensor | None, delta: int) -> torch.Tensor:
    """The positions on three axes (M-RoPE) of tokens at `positions` of a prompt, int64 [3, n], even after its end.

    listed: [3, tokens of the prompt], of one with images; None for text, which has the same position on all axes.
    delta: how far text after the prompt is from where one axis would have it.
    """
    index = torch.from_numpy(positions).long()
    if listed is None:
        return index.expand(3, -1)
    last = listed.shape[1] - 1
    return torch.where(index <= last, listed.to(index)[:, index.clamp(max=last)], index + delta)


def axes_of_rows(rows: Sequence[AttentionRow], given: Sequence[tuple[torch.Tensor | None, int]]) -> torch.Tensor:
    """The positions on three axes of the new tokens of these rows, int64 [3, n].

    given: of each request of the batch, `listed` and `delta`, see `axes_of`.
    """
    return torch.cat([axes_of(row.positions[row.prefix_len :], *given[row.request]) for row in rows], 1)


def one_token(table: SegmentTable) -> ExtendRows:
    """A row of one token without segments, in slot 0: kernels that have run on it are compiled."""
    ints: dict[str, Any] = dict(dtype=torch.int32, device=table.ends.device)
    zero, indptr = torch.zeros(1, **ints), torch.arange(2, **ints)
    return ExtendRows(
        kv_indptr=indptr,
        kv_indices=zero,
        num_segments=zero,
        segment_ends=table.ends[:1],
        segment_offsets=table.offsets[:1],
        qo_indptr=indptr,
        q_positions=zero,
        kv_positions=zero,
        max_extend_len=1,
    )

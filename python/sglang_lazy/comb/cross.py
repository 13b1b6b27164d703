"""Cross-attention: rows that read chunks through separate layers."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rows import ExtendRows, Rows
from sglang_lazy.attention.metadata import PrefillRows, fill_segments
from sglang_lazy.attention.rows import Pass
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.comb.encoder_rows import EncoderRows
from sglang_lazy.core.device import ints_to_device, read_here, to_device
from sglang_lazy.core.state import LinkedRequest

AFTER_ALL = 2**30
"""The position of queries that see all KV tokens; small enough for kernels to add to it."""


@dataclasses.dataclass(frozen=True, eq=False)
class CrossBatch:
    """A batch as cross-attention needs it; its self-attention is SGLang's.

    slots: per request, int32, the slots of all its chunks; None if it has no chunks.
    extend_lens: per request, how many tokens it computes; None in decode, where it is one.
    rows: empty, since self-attention needs none of its own; see `LinkedBatch`.
    """

    slots: Sequence[torch.Tensor | None] = ()
    extend_lens: Sequence[int] | None = None
    rows: ClassVar[tuple] = ()

    @classmethod
    def of(
        cls, current: Pass, separate: bool = True, max_rows: float = math.inf, *, windows: bool = False
    ) -> "CrossBatch | None":
        """The description of a pass about to run; None if none of its requests reads chunks."""
        slots = [state.cross_slots if isinstance(state, LinkedRequest) else None for state in current.states]
        if all(part is None for part in slots):
            return None
        for part in slots:
            if part is not None:  # its request may end and free it before the pass has run
                read_here(part)
        return cls(slots, current.extend_lens)

    def decode(self, rows: Rows, places: torch.Tensor, table: SegmentTable) -> None:
        """Write the rows of a decode step.  places: int64 [their number], including padding at the end."""
        lens = np.zeros(rows.bs, dtype=np.int32)
        lens[: len(self.slots)] = [0 if part is None else len(part) for part in self.slots]
        fill_segments(rows, places, to_device(lens, rows.device), table)
        if slots := [part for part in self.slots if part is not None]:
            torch.cat(slots, out=rows.kv_indices[: lens.sum()])
        rows.check_contents()

    def prefill(self, table: SegmentTable) -> PrefillRows:
        """The rows with chunks. They have no segments, since keys are not rotated."""
        assert self.extend_lens is not None
        rows = [(i, part) for i, part in enumerate(self.slots) if part is not None]
        begins = np.cumsum([0, *self.extend_lens])
        places = [np.arange(begins[i], begins[i + 1]) for i, _ in rows]
        num_new, num_kv = [len(tokens) for tokens in places], [len(part) for _, part in rows]
        tokens = np.concatenate(places)
        parts: list[Any] = ints_to_device(
            [
                np.cumsum([0, *num_kv]),
                np.cumsum([0, *num_new]),
                np.full(len(tokens), AFTER_ALL),
                np.concatenate([np.arange(n) for n in num_kv]),
                np.zeros(len(rows)),
            ],
            table.ends.device,
        )
        kv_indptr, qo_indptr, q_positions, kv_positions, no_segments = parts
        everybody = len(tokens) == begins[-1]
        extend_rows = ExtendRows(
            kv_indptr=kv_indptr,
            kv_indices=torch.cat([part for _, part in rows]),
            num_segments=no_segments,
            segment_ends=table.ends[: len(rows)],
            segment_offsets=table.offsets[: len(rows)],
            qo_indptr=qo_indptr,
            q_positions=q_positions,
            kv_positions=kv_positions,
            max_extend_len=max(num_new),
        )
        return PrefillRows(extend_rows, tokens=None if everybody else to_device(tokens, table.ends.device))


class Readers:
    """The new tokens of a batch that read chunks."""

    def __init__(self, tokens: slice | torch.Tensor | None = None, row_lens: torch.Tensor | None = None):
        """tokens: in prefill, their indices, int64; None: all.
        row_lens: in decode, [bs], how many KV tokens of chunks each row reads; only the device knows which read any.
        """
        self.tokens, self.row_lens = tokens, row_lens

    def replace(
        self,
        states: torch.Tensor,
        change: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply `change` to the readers' `states` and leave those of other tokens as they are.

        states: [number of tokens, hidden_size], the sum of `hidden` and `residual`, which are returned anew.
        """
        if self.row_lens is not None:
            reads = (self.row_lens > 0)[:, None]
            changed = change(states)
            if residual is None:
                return torch.where(reads, changed, hidden), None
            return hidden.masked_fill(reads, 0), torch.where(reads, changed, residual)
        if self.tokens is None:
            return change(states), None
        changed = change(states[self.tokens])
        if residual is None:
            return hidden.index_copy(0, self.tokens, changed), None
        return hidden.index_fill(0, self.tokens, 0), residual.index_copy(0, self.tokens, changed)


class CrossReader:
    """Attention of the cross layers over the chunks of the current batch.

    prefill, decode: the rows of the batch in a prefill or decode step; None if none of its requests reads chunks.
    """

    def __init__(self, table: SegmentTable, dtype: torch.dtype, kv_buffer: Callable[[int], tuple]):
        """dtype: of queries.  kv_buffer: returns K and V of a cross layer."""
        self.prefill: PrefillRows | None = None
        self.decode: Rows | None = None
        layer, device = table.model.layers[0], table.ends.device
        self.table, self._kv_buffer, self._ops = table, kv_buffer, layer.kernels
        self._graph_rows: Rows | None = None
        self._layers: dict[int, Layer] = {}
        self._dims = layer.decode_plan.dims
        self._workspace = self._ops.decode_workspace(len(table.ends), table.max_segments, **self._dims, device=device)
        # Run both kernels once with one token, so that no request waits for their compilation.
        heads = [layer.num_qo_heads, layer.num_kv_heads, layer.num_kv_heads]
        # Views of one tensor, as in the encoder: kernels are specialized on the stride between tokens.
        q, k, v = torch.zeros(1, sum(heads), layer.head_dim, dtype=dtype, device=device).split(heads, dim=1)
        EncoderRows([1], False, self._ops, layer.rope).attend(q, k, v, 1.0)
        slot = torch.zeros(1, dtype=torch.int32, device=device)
        self.prefill = CrossBatch([slot], [1]).prefill(table)
        self.attend(0, q)
        self.prefill = None

    def describe(self, current: CrossBatch | None, pool_indices: torch.Tensor) -> None:
        """Prepare for a batch, None if nothing in it reads chunks.  pool_indices: int64, its rows, with padding."""
        self.prefill = self.decode = None
        if current is None:
            return
        if current.extend_lens is not None:
            self.prefill = current.prefill(self.table)
            return
        num_kv = sum(len(part) for part in current.slots if part is not None)
        self._plan(current, self._allocate(len(pool_indices), num_kv), pool_indices)

    def allocate_for_graphs(self, max_bs: int, max_context: int) -> None:
        """Allocate the rows of decode graphs of up to `max_bs` rows with up to `max_context` chunk tokens each."""
        self._graph_rows = self._allocate(max_bs, max_bs * max_context)

    def describe_for_graph(self, current: CrossBatch | None, pool_indices: torch.Tensor) -> None:
        """`describe` into the memory that decode graphs read."""
        self.prefill = self.decode = None
        if current is not None:
            assert self._graph_rows is not None
            self._plan(current, self._graph_rows.first(len(pool_indices)), pool_indices)

    def _allocate(self, bs: int, num_kv: int) -> Rows:
        return Rows.allocate(bs, num_kv, self.table.max_segments, self.table.ends.device)

    def _plan(self, current: CrossBatch, rows: Rows, pool_indices: torch.Tensor) -> None:
        current.decode(rows, pool_indices, self.table)
        self.decode = rows
        self._ops.plan_decode(self._workspace, rows, **self._dims)

    def readers(self) -> Readers | None:
        """The new tokens that read chunks; None if none does."""
        if self.decode is not None:
            return Readers(row_lens=self.decode.kv_indptr.diff())
        return None if self.prefill is None else Readers(self.prefill.tokens)

    def through(
        self,
        layer: Callable[[torch.Tensor, "CrossReader"], torch.Tensor],
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`hidden` and `residual` after a cross layer, changed only for tokens that read chunks.

        Layers normalize the sum of the two before rounding it. For other tokens they stay separate, so that their
        results are bit-identical to those in a batch without chunks.
        """
        if (readers := self.readers()) is None:
            return hidden, residual
        states = hidden if residual is None else hidden + residual
        return readers.replace(states, lambda x: layer(x, self), hidden, residual)

    def attend(self, index: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of the readers' tokens over all of their chunks.

        index: the cross layer.  q: [number of tokens, num_qo_heads, head_dim].
        """
        layer = self._layer(index, q.dtype)
        if self.decode is not None:
            return self._ops.link_decode(q, layer, self.decode, workspace=self._workspace)
        assert self.prefill is not None
        return self._ops.link_extend(q, layer, self.prefill.rows)

    def _layer(self, index: int, dtype: torch.dtype) -> Layer:
        """A cross layer as kernels take it, once its chunks are loaded from the host."""
        if self.table.loads is not None:
            self.table.loads.wait(index)
        described, caches, known = self.table.model.layers[index], self._kv_buffer(index), self._layers.get(index)
        if known is None or known.k_cache is not caches[0]:
            known = self._layers[index] = described.with_caches(caches, dtype, described.head_dim**-0.5)
        return known

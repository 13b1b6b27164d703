"""The link path of an attention backend: linked rows take it, all others go to SGLang's own code.

A prefill batch may hold both, as that of a cold prompt does, whose chunks are ordinary prefills; a small one takes the
link path whole, `LinkedBatch.linked` says which. A backend keeps its stock name and class, because much of SGLang is
decided by them; `with_link_path` gives one instance a subclass of its class.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_kernel_lazy import get_implementation
from sglang_lazy.attention.table import AttentionRow, LinkedBatch, table_of, to_device
from sglang_lazy.port.probe import check_rotation
from sglang_lazy.port.rope import attention_layers, layer_ropes

ROW_WIDTH = 8192
"""Entries that a row of what SGLang's own attention reads instead of `req_to_token` has room for, at least."""


@dataclasses.dataclass
class LinkMetadata:
    """The rows of a batch that take the link path, as the kernels take them; see `sgl_kernel_lazy` for shapes.

    Graphs read this snapshot, never the live tables, which the scheduler may rewrite while a graph runs.

    tokens: which of the tokens to compute are theirs: a slice, or int32 indices.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    num_segments: torch.Tensor
    segment_ends: torch.Tensor
    segment_offsets: torch.Tensor
    qo_indptr: torch.Tensor | None = None
    q_positions: torch.Tensor | None = None
    kv_positions: torch.Tensor | None = None
    max_extend_len: int = 0
    tokens: slice | torch.Tensor = dataclasses.field(default_factory=lambda: slice(None))
    checked: bool = False  # by a layer before

    @classmethod
    def allocate(cls, max_bs: int, max_kv: int, max_segments: int, device: str) -> "LinkMetadata":
        """Room for the snapshot of any decode batch of at most `max_bs` rows and `max_kv` entries."""
        return cls(
            kv_indptr=torch.zeros(max_bs + 1, dtype=torch.int32, device=device),
            kv_indices=torch.zeros(max_kv, dtype=torch.int32, device=device),
            num_segments=torch.zeros(max_bs, dtype=torch.int32, device=device),
            segment_ends=torch.zeros(max_bs, max_segments, dtype=torch.int32, device=device),
            segment_offsets=torch.zeros(max_bs, max_segments, dtype=torch.int32, device=device),
        )

    def first(self, bs: int) -> "LinkMetadata":
        """A view of the first `bs` rows."""
        return LinkMetadata(
            kv_indptr=self.kv_indptr[: bs + 1],
            kv_indices=self.kv_indices,
            num_segments=self.num_segments[:bs],
            segment_ends=self.segment_ends[:bs],
            segment_offsets=self.segment_offsets[:bs],
        )


class StockPart(NamedTuple):
    """What SGLang's own attention computes of a prefill batch that it cannot take as SGLang describes it.

    batch: the description that it is given.
    req_to_token: int32 [rows of `batch`, width], which it is to read instead of the pool's.
    """

    batch: ForwardBatch
    req_to_token: torch.Tensor


class LinkAttention(AttentionBackend):
    """Mixed into a stock backend's class by `with_link_path`.

    link_metadata, link_stock_part: of the batch under way, None for what it does not have; both None if it is SGLang's.
    """

    def init_link_path(self, runner, link_backend: str) -> None:
        """Read what the link path needs from a `ModelRunner` whose model is loaded."""
        self.link_metadata: LinkMetadata | None = None
        self.link_stock_part: StockPart | None = None
        self.link_ops = get_implementation(link_backend)
        self.link_ropes = layer_ropes(runner.model, runner.model_config.context_len, runner.device)
        check_rotation(runner.model, self.link_ropes, runner.model_config.hidden_size, runner.dtype)
        self.link_pool = runner.token_to_kv_pool
        self.link_fp8 = runner.kv_cache_dtype != runner.dtype
        self.link_rows = runner.req_to_token_pool
        self.link_table = table_of(runner.req_to_token_pool)
        layers = {attn.layer_id: attn for attn, _ in attention_layers(runner.model)}
        attn = next(iter(layers.values()))
        self.link_dims = dict(
            num_qo_heads=attn.tp_q_head_num, num_kv_heads=attn.tp_k_head_num, head_dim=attn.qk_head_dim
        )
        max_bs, max_segments = self.link_rows.req_to_token.shape[0], self.link_table.ends.shape[1]
        self.link_workspace = self.link_ops.decode_workspace(
            max_bs, max_segments, **self.link_dims, device=torch.device(runner.device)
        )
        for layer_id in {id(rope): layer_id for layer_id, rope in self.link_ropes.items()}.values():
            self._compile_extend(layers[layer_id], runner)

    def _compile_extend(self, attn, runner) -> None:
        """One row over one entry, so that the kernels are compiled before the first request needs them."""

        def ints(*values):
            return torch.tensor(values, dtype=torch.int32, device=runner.device)

        self._copy_slots(ints(0), ints(0).to(torch.int64), ints(0), ints(0), ints(0))
        self.link_ops.link_extend(
            torch.zeros(1, attn.tp_q_head_num, attn.qk_head_dim, dtype=runner.dtype, device=runner.device),
            *self.link_pool.get_kv_buffer(attn.layer_id),
            ints(0, 1),
            ints(0),
            ints(0, 1),
            ints(0),
            ints(0),
            ints(0),
            self.link_table.ends[:1],
            self.link_table.offsets[:1],
            max_extend_len=1,
            **self._options(attn),
        )

    # Metadata

    def init_forward_metadata(self, forward_batch) -> None:
        self.link_metadata = self.link_stock_part = None
        current = self.link_table.current
        if current is None:
            return super().init_forward_metadata(forward_batch)
        if not current.rows:
            self.link_metadata = self._snapshot(forward_batch)
            return
        if len(current.linked):
            self.link_metadata = self._snapshot_prefill(forward_batch, current)
        if len(current.linked) < len(current.rows):
            self.link_stock_part = part = self._stock_part(forward_batch, current)
            with self._reading(part.req_to_token):
                super().init_forward_metadata(part.batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        max_context = self.link_rows.req_to_token.shape[1]
        max_segments = self.link_table.ends.shape[1]
        self.link_graph_metadata = LinkMetadata.allocate(
            max_bs, max_bs * max_context, max_segments, self.link_table.ends.device
        )

    def init_forward_metadata_out_graph(self, forward_batch, in_capture: bool = False) -> None:
        self.link_stock_part = None
        if self.link_table.current is None:
            self.link_metadata = None
            return super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)
        self.link_metadata = self.link_graph_metadata.first(forward_batch.batch_size)
        self._fill(self.link_metadata, forward_batch)
        self._plan_decode(self.link_metadata)

    def init_forward_metadata_in_graph(self, forward_batch) -> None:
        if self.link_metadata is None:
            super().init_forward_metadata_in_graph(forward_batch)

    def _snapshot(self, forward_batch) -> LinkMetadata:
        """The metadata of an eager decode batch."""
        table, num_kv = self.link_table, int(forward_batch.seq_lens_cpu.sum())
        metadata = LinkMetadata.allocate(forward_batch.batch_size, num_kv, table.ends.shape[1], table.ends.device)
        self._fill(metadata, forward_batch)
        self._plan_decode(metadata)
        return metadata

    def _snapshot_prefill(self, forward_batch, current: LinkedBatch) -> LinkMetadata:
        """The metadata of the rows of a prefill batch that take the link path."""
        table, device = self.link_table, self.link_table.ends.device
        extend_lens = np.array([row.num_new for row in current.rows])
        begins = extend_lens.cumsum() - extend_lens
        tokens = np.concatenate([np.arange(begins[i], begins[i] + extend_lens[i]) for i in current.linked])
        rows = [current.rows[i] for i in current.linked]
        indptrs = [
            np.cumsum([0, *lens]) for lens in ([len(row.positions) for row in rows], [row.num_new for row in rows])
        ]
        windows = windows_of(rows, indptrs[0][:-1])
        kv_indptr, qo_indptr, q_positions, kv_positions, requests, *windows = ints_to_device(
            [
                *indptrs,
                current.q_positions[tokens],
                np.concatenate([row.positions for row in rows]),
                np.array([row.request for row in rows]),
                *windows,
            ],
            device,
        )
        pool_rows = forward_batch.req_pool_indices[requests]
        metadata = LinkMetadata(
            kv_indptr=kv_indptr,
            kv_indices=torch.empty_like(kv_positions),
            num_segments=table.num_segments[pool_rows],
            segment_ends=table.ends[pool_rows],
            segment_offsets=table.offsets[pool_rows],
            qo_indptr=qo_indptr,
            q_positions=q_positions,
            kv_positions=kv_positions,
            max_extend_len=max(row.num_new for row in rows),
        )
        self._copy_windows(metadata.kv_indices, forward_batch, windows)
        if len(rows) < len(current.rows):
            first, last = int(tokens[0]), int(tokens[-1])
            consecutive = last - first == len(tokens) - 1
            metadata.tokens = slice(first, last + 1) if consecutive else to_device(tokens.astype(np.int32), device)
        return metadata

    def _stock_part(self, forward_batch, current: LinkedBatch) -> StockPart:
        """The batch for SGLang's own attention, row by row as `current` cuts it.

        Linked rows cannot be left out, since tokens to compute stand one behind the other there; what comes of theirs
        is replaced. So that it costs little, they seem to be as long as what they have to compute.
        """
        linked = set(current.linked)
        rows = [
            row._replace(windows=[(0, row.num_new)], positions=row.positions[: row.num_new]) if i in linked else row
            for i, row in enumerate(current.rows)
        ]
        prefix_lens, extend_lens = np.array([(row.prefix_len, row.num_new) for row in rows]).T
        seq_lens, indices = prefix_lens + extend_lens, np.arange(len(rows))
        # Few widths, since SGLang's Triton kernels are compiled for each.
        width = max(ROW_WIDTH, 1 << int(seq_lens.max() - 1).bit_length())
        starts, windows = extend_lens.cumsum() - extend_lens, windows_of(rows, indices * width)
        part = copy.copy(forward_batch)
        part.batch_size = len(rows)
        part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu = prefix_lens.tolist(), extend_lens.tolist()
        part.seq_lens_cpu, part.seq_lens_sum = torch.from_numpy(seq_lens), int(seq_lens.sum())
        device = forward_batch.seq_lens.device
        part.extend_prefix_lens, part.extend_seq_lens, part.extend_start_loc, seq_lens, indices, *windows = (
            ints_to_device([prefix_lens, extend_lens, starts, seq_lens, indices, *windows], device)
        )
        part.seq_lens = seq_lens.to(forward_batch.seq_lens.dtype)
        part.req_pool_indices = indices.to(forward_batch.req_pool_indices.dtype)
        req_to_token = torch.zeros(len(rows), width, dtype=torch.int32, device=device)
        self._copy_windows(req_to_token.view(-1), forward_batch, windows)
        return StockPart(part, req_to_token)

    @contextlib.contextmanager
    def _reading(self, req_to_token: torch.Tensor) -> Iterator[None]:
        """Have SGLang's code read other rows than the pool's: its backends keep references to one tensor object."""
        kept, self.link_rows.req_to_token.data = self.link_rows.req_to_token.data, req_to_token
        try:
            yield
        finally:
            self.link_rows.req_to_token.data = kept

    def _fill(self, metadata: LinkMetadata, forward_batch) -> None:
        """Copy the rows and segments of a decode batch out of the live tables, without a device synchronisation."""
        rows, table = forward_batch.req_pool_indices, self.link_table
        torch.cumsum(forward_batch.seq_lens, 0, dtype=torch.int32, out=metadata.kv_indptr[1:])
        torch.index_select(table.num_segments, 0, rows, out=metadata.num_segments)
        torch.index_select(table.ends, 0, rows, out=metadata.segment_ends)
        torch.index_select(table.offsets, 0, rows, out=metadata.segment_offsets)
        self._copy_slots(metadata.kv_indices, rows, None, forward_batch.seq_lens, metadata.kv_indptr)

    def _copy_windows(self, out: torch.Tensor, forward_batch, windows: Sequence[torch.Tensor]) -> None:
        """windows: of `windows_of`, on the device."""
        requests, starts, lens, places = windows
        self._copy_slots(out, forward_batch.req_pool_indices[requests], starts, lens, places)

    def _copy_slots(self, out, rows, starts, lens, places) -> None:
        """Copy `lens` slots of these rows of `req_to_token`, the first those at `starts` (None: 0), to `places`."""
        req_to_token = self.link_rows.req_to_token
        if req_to_token.is_cuda:
            create_flashinfer_kv_indices_triton[(len(rows),)](
                req_to_token, rows, lens, places, starts, out, req_to_token.stride(0)
            )
            return
        starts = torch.zeros_like(lens) if starts is None else starts
        for row, start, length, place in torch.stack([rows, starts, lens, places[: len(rows)]], dim=1).tolist():
            out[place : place + length] = req_to_token[row, start : start + length]

    def _plan_decode(self, metadata: LinkMetadata) -> None:
        self.link_ops.plan_decode(
            self.link_workspace,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.num_segments,
            metadata.segment_ends,
            metadata.segment_offsets,
            **self.link_dims,
        )

    # Attention

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        if self.link_metadata is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        q, k_cache, v_cache, arguments = self._prepare(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        metadata = self.link_metadata
        out = self.link_ops.link_decode(
            q,
            k_cache,
            v_cache,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.num_segments,
            metadata.segment_ends,
            metadata.segment_offsets,
            workspace=self.link_workspace,
            **arguments,
        )
        return out.flatten(1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        metadata, stock_part = self.link_metadata, self.link_stock_part
        if metadata is None and stock_part is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        heads, k_cache, v_cache, arguments = self._prepare(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        # In graphs SGLang hands over the memory that it would copy the result to.
        out = forward_batch._attn_output
        if stock_part is not None:
            stock_part.batch._attn_output = out
            with self._reading(stock_part.req_to_token):
                out = super().forward_extend(q, k, v, layer, stock_part.batch, save_kv_cache=False)
        if metadata is None:
            return out
        out = torch.empty_like(heads, memory_format=torch.contiguous_format) if out is None else out.view(heads.shape)
        in_place = isinstance(metadata.tokens, slice)
        linked = self.link_ops.link_extend(
            heads[metadata.tokens],
            k_cache,
            v_cache,
            metadata.qo_indptr,
            metadata.q_positions,
            metadata.kv_indptr,
            metadata.kv_indices,
            metadata.kv_positions,
            metadata.num_segments,
            metadata.segment_ends,
            metadata.segment_offsets,
            max_extend_len=metadata.max_extend_len,
            validate=not metadata.checked,
            out=out[metadata.tokens] if in_place else None,
            **arguments,
        )
        if not in_place:
            out[metadata.tokens] = linked
        metadata.checked = True
        return out.flatten(1)

    def _prepare(self, q, k, v, layer, forward_batch, save_kv_cache: bool, kwargs: dict):
        """Store new keys and values; returns q by head, the layer's caches, and arguments common to both kernels."""
        unknown = [name for name, value in kwargs.items() if value is not None]
        if unknown:
            raise NotImplementedError(
                f"linked attention does not know {unknown}, which layer {layer.layer_id} asks for"
            )
        if save_kv_cache:
            slots = KVWriteLoc(forward_batch.out_cache_loc)
            self.link_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        k_cache, v_cache = self.link_pool.get_kv_buffer(layer.layer_id)
        return q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), k_cache, v_cache, self._options(layer)

    def _options(self, layer) -> dict:
        """Arguments common to both kernels that are the same for every batch."""
        rope = self.link_ropes[layer.layer_id]
        # The pool divides by the scales only where it rounds to fp8.
        k_scale, v_scale = kv_scales(layer) if self.link_fp8 else (1.0, 1.0)
        return {
            "cos_sin_cache": rope.cos_sin_cache,
            "is_neox": rope.is_neox,
            "sm_scale": layer.scaling * k_scale,
            "v_scale": v_scale,
        }


def ints_to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """int32 copies, in one transfer, each aligned to 16 bytes: for others Triton compiles its kernels anew."""
    sizes = [-(-len(array) // 4) * 4 for array in arrays]
    buffer = np.zeros(sum(sizes), dtype=np.int32)
    for begin, size, array in zip(np.cumsum(sizes), sizes, arrays, strict=True):
        buffer[begin - size :][: len(array)] = array
    parts = to_device(buffer, device).split(sizes)
    return [part[: len(array)] for part, array in zip(parts, arrays, strict=True)]


def windows_of(rows: Sequence[AttentionRow], places: np.ndarray) -> list[np.ndarray]:
    """The windows of rows whose entries go to `places`: of each its request, start, length and place."""
    windows = []
    for row, place in zip(rows, places.tolist(), strict=True):
        for start, end in row.windows:
            windows.append((row.request, start, end - start, place))
            place += end - start
    return list(np.array(windows).T)


def kv_scales(layer) -> tuple[float, float]:
    """What a layer's keys and values are divided by before they are rounded to fp8.

    As numbers; reading the tensors that SGLang keeps beside them would wait for the device.
    """
    return layer.k_scale_float or 1.0, layer.v_scale_float or 1.0


def with_link_path(backend: AttentionBackend, runner, link_backend: str) -> AttentionBackend:
    """`backend` itself, with the link path before its own methods."""
    stock = type(backend)
    backend.__class__ = type(f"Link{stock.__name__}", (LinkAttention, stock), {})
    backend.init_link_path(runner, link_backend)
    return backend

"""The link path of an attention backend: linked rows take it, all others go to SGLang's own code.

A prefill batch may hold both kinds: a cold prompt's chunks are ordinary prefills. A small batch takes the link path as
a whole, see `LinkedBatch.linked`. SGLang often checks a backend's name and class, so `with_link_path` keeps its name
and gives the instance a subclass of its class.
"""

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rows import ExtendRows
from sglang_lazy.attention.decode_rows import DecodeRows, PlannedRows, StepRows
from sglang_lazy.attention.metadata import CopyRanges, PrefillRows, one_token
from sglang_lazy.attention.rows import LinkedBatch, StockRows
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.device import ints_to_device
from sglang_lazy.core.model import DecodePlan, ServedModel
from sglang_lazy.port.facts import flags_of
from sglang_lazy.port.graphs import batch_of_graph, captures_linked_rows
from sglang_lazy.port.model.compat import kv_scales
from sglang_lazy.port.model.layers import attention_layers


class KeysStored(Exception):
    """Ends the forward pass: `SegmentTable.last_layer` has stored its keys."""


class StockPart(NamedTuple):
    """The part of a prefill batch with linked rows or fills that SGLang's own attention computes.

    batch: passed to SGLang's attention.
    req_to_token: int32 [rows of `batch`, width], read instead of the pool's.
    """

    batch: ForwardBatch
    req_to_token: torch.Tensor

    @classmethod
    def of(
        cls,
        forward_batch: ForwardBatch,
        current: LinkedBatch,
        copy_ranges: CopyRanges,
    ) -> "StockPart":
        """`forward_batch`, with the rows of `current`; see `StockRows`."""
        prefix_lens, extend_lens, ranges, width = StockRows.of(current)
        num_rows, seq_lens = len(prefix_lens), prefix_lens + extend_lens
        part = copy.copy(forward_batch)
        part.batch_size = num_rows
        part.extend_prefix_lens_cpu, part.extend_seq_lens_cpu = prefix_lens.tolist(), extend_lens.tolist()
        part.seq_lens_cpu, part.seq_lens_sum = torch.from_numpy(seq_lens), int(seq_lens.sum())
        device = forward_batch.seq_lens.device
        starts, indices = extend_lens.cumsum() - extend_lens, np.arange(num_rows)
        part.extend_prefix_lens, part.extend_seq_lens, part.extend_start_loc, seq_lens, indices, *ranges = (
            ints_to_device([prefix_lens, extend_lens, starts, seq_lens, indices, *ranges], device)
        )
        part.seq_lens = seq_lens.to(forward_batch.seq_lens.dtype)
        part.req_pool_indices = indices.to(forward_batch.req_pool_indices.dtype)
        req_to_token = torch.zeros(num_rows, width, dtype=torch.int32, device=device)
        copy_ranges(req_to_token.view(-1), ranges)
        return cls(part, req_to_token)

    @contextlib.contextmanager
    def shown_to(self, pool_req_to_token: torch.Tensor) -> Iterator[None]:
        """Let SGLang's code read these rows instead of the pool's, whose tensor its backends keep references to."""
        kept, pool_req_to_token.data = pool_req_to_token.data, self.req_to_token
        try:
            yield
        finally:
            pool_req_to_token.data = kept


def copy_slots(
    req_to_token: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Copy slots from rows of `req_to_token` to `out`: `lens` of each row, from `starts`, to `places`."""
    if req_to_token.is_cuda:
        create_flashinfer_kv_indices_triton[(len(rows),)](
            req_to_token, rows, lens, places, starts, out, req_to_token.stride(0)
        )
        return
    for row, start, length, place in torch.stack([rows, starts, lens, places], dim=1).tolist():
        out[place : place + length] = req_to_token[row, start : start + length]


def copy_ranges(
    req_to_token: torch.Tensor, pool_indices: torch.Tensor, out: torch.Tensor, ranges: Sequence[torch.Tensor]
) -> None:
    """Copy the slots of `ranges` to `out`.  ranges: from `row_ranges`, on the device."""
    requests, *ranges = ranges
    copy_slots(req_to_token, out, pool_indices[requests], *ranges)


class LinkAttention(AttentionBackend):
    """Mixed into a stock backend's class by `with_link_path`.

    link_prefill, link_stock_part: the two parts of the current prefill batch, None for one that is empty.
    link_probe_rows: the linked rows with the queries of the batch's probes, if any.
    link_planned: the rows of the current decode batch, by plan, or of the chains that it verifies. All are None if the
        batch is entirely SGLang's.
    link_window_slots: slots of the new tokens in the pool of window layers, if these have their own.
    """

    def init_link_path(self, runner: Any, table: SegmentTable, model: ServedModel) -> None:
        """Set up the link path for a `ModelRunner` whose model is loaded.  model: its description."""
        self.link_prefill: PrefillRows | None = None
        self.link_probe_rows: ExtendRows | None = None
        self.link_stock_part: StockPart | None = None
        self.link_planned: dict[DecodePlan, PlannedRows] | None = None
        self.link_window_slots: torch.Tensor | None = None
        self.link_table = table
        self.link_model = model
        self.link_pool = runner.token_to_kv_pool
        self.link_fp8 = runner.kv_cache_dtype != runner.dtype
        self.link_rows = runner.req_to_token_pool
        self.link_layers: dict[int, tuple[tuple, Layer]] = {}
        verified = flags_of(runner.server_args).speculative_num_draft_tokens or 1  # tokens of a request in one step
        self.link_decode = DecodeRows(table, runner.req_to_token_pool.req_to_token, model, verified)
        compiled = set()
        for attn, _ in attention_layers(runner.model):
            # Triton's kernels contain the scale, of which an fp8 cache's is a part.
            variant = model.layers[attn.layer_id], self._scales(attn)[0]
            if variant not in compiled:
                self._compile_extend(attn, runner)
                compiled.add(variant)

    def _compile_extend(self, attn: Any, runner: Any) -> None:
        """Run the kernels on one token, so that they are compiled before the first request."""
        zero = torch.zeros(1, dtype=torch.int32, device=runner.device)
        copy_slots(self.link_rows.req_to_token, zero.clone(), zero.to(torch.int64), zero, zero, zero)
        described, rows = self.link_model.layers[attn.layer_id], one_token(self.link_table)
        sinks = torch.zeros(attn.tp_q_head_num, dtype=runner.dtype, device=runner.device) if described.sinks else None
        q = torch.zeros(1, attn.tp_q_head_num, attn.qk_head_dim, dtype=runner.dtype, device=runner.device)
        described.kernels.link_extend(q, self._with_caches(attn, runner.dtype, sinks), rows)

    # Metadata

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.link_prefill = self.link_probe_rows = self.link_stock_part = self.link_planned = None
        current = self.link_table.current
        if current is None:
            return super().init_forward_metadata(forward_batch)
        window_slots = self.link_model.window_slots
        if window_slots is not None:
            self.link_window_slots = window_slots[forward_batch.out_cache_loc]
        if not current.rows:
            self.link_planned = self.link_decode.of(rows_of(forward_batch))
            return
        pool_indices = forward_batch.req_pool_indices
        copy = functools.partial(copy_ranges, self.link_rows.req_to_token, pool_indices)
        if len(current.linked):
            self.link_prefill = current.prepared(lambda: PrefillRows.of(current, pool_indices, self.link_table, copy))
            if (probes := self.link_table.probes) is not None:
                self.link_probe_rows = probes.rows(self.link_prefill.rows)
        if len(current.linked) < len(current.rows):
            self.link_stock_part = part = StockPart.of(forward_batch, current, copy)
            with part.shown_to(self.link_rows.req_to_token):
                super().init_forward_metadata(part.batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.link_decode.allocate_for_graphs(max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self.link_prefill = self.link_probe_rows = self.link_stock_part = self.link_planned = None
        if batch_of_graph(self.link_table, in_capture) is None:
            super().init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Have a graph for linked rows prepare its batch itself, from tensors that SGLang fills before each replay: the
        host launches nothing for it."""
        if not captures_linked_rows():
            return super().init_forward_metadata_in_graph(forward_batch)
        self.link_planned = self.link_decode.of(rows_of(forward_batch), for_graph=True)
        if self.link_model.window_slots is not None:
            self.link_window_slots = self.link_model.window_slots[forward_batch.out_cache_loc]

    # Attention

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        if self.link_planned is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        return self._forward_planned(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward_planned(self, q, k, v, layer, forward_batch, save_kv_cache: bool, kwargs: dict):
        assert self.link_planned is not None
        heads, linked = self._prepare(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        described = self.link_model.layers[layer.layer_id]
        rows, workspace = self.link_planned[described.decode_plan]
        return described.kernels.link_decode(heads, linked, rows, workspace=workspace).flatten(1)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache: bool = True, **kwargs):
        if layer.layer_id == self.link_table.last_layer:
            self._prepare(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
            raise KeysStored
        if self.link_planned is not None:
            return self._forward_planned(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        prefill, stock_part = self.link_prefill, self.link_stock_part
        if prefill is None and stock_part is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)
        heads, linked = self._prepare(q, k, v, layer, forward_batch, save_kv_cache, kwargs)
        out = torch.empty_like(heads, memory_format=torch.contiguous_format)
        if (given := forward_batch._attn_output) is not None:  # in graphs; padded where q is
            out = given.view(-1, *heads.shape[1:])[: len(heads)]
        if stock_part is not None:
            stock_part.batch._attn_output = out
            with stock_part.shown_to(self.link_rows.req_to_token):
                q = heads.flatten(1)
                stock = super().forward_extend(q, k, v, layer, stock_part.batch, save_kv_cache=False, **kwargs)
            if stock.data_ptr() != out.data_ptr():  # not all of SGLang's backends use the given buffer
                out.copy_(stock.view(out.shape))
        if prefill is None:
            return out.flatten(1)
        described, whole = self.link_model.layers[layer.layer_id], self.link_model.keeps_all(layer.layer_id)
        rows, tokens = prefill.rows if whole else prefill.window_rows, prefill.tokens
        in_place = not isinstance(tokens, torch.Tensor)
        result = described.kernels.link_extend(
            heads if tokens is None else heads[tokens],
            linked,
            rows,
            out=(out if tokens is None else out[tokens]) if in_place else None,
        )
        if not in_place:
            out[tokens] = result
        probes = self.link_table.probes
        if probes is not None and layer.layer_id in probes.layers:
            assert self.link_probe_rows is not None, "the row of a probe has segments"
            measured = heads[probes.tokens], linked, self.link_probe_rows
            described.kernels.accumulate_attention(probes.sums, *measured)
        return out.flatten(1)

    def _prepare(self, q, k, v, layer, forward_batch, save_kv_cache: bool, kwargs: dict):
        """Store the new keys and values. Returns q by head, and the layer as kernels take it."""
        unknown = [name for name, value in kwargs.items() if value is not None and name != "sinks"]
        if unknown:
            raise NotImplementedError(
                f"linked attention does not support {unknown}, which layer {layer.layer_id} passes"
            )
        if (loads := self.link_table.loads) is not None and self.link_model is self.link_table.model:
            loads.wait(layer.layer_id)
        if save_kv_cache:
            slots = KVWriteLoc(forward_batch.out_cache_loc, self.link_window_slots)
            if self.link_fp8 and self.link_stock_part is not None:
                # The pool divides them by the scales in place, and SGLang's attention may read them, not the cache.
                k, v = k.clone(), v.clone()
            self.link_pool.set_kv_buffer(layer, slots, k, v, layer.k_scale, layer.v_scale)
        # SGLang cuts off what pads q to the size of a prefill graph, but not where q has a batch dimension (Gemma 3).
        # A draft that reads the target's KV has no slots to store in, and nothing pads it.
        slots = forward_batch.out_cache_loc
        heads = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)[: None if slots is None else len(slots)]
        return heads, self._with_caches(layer, heads.dtype, kwargs.get("sinks"))

    def _with_caches(self, attn: Any, dtype: torch.dtype, sinks: torch.Tensor | None) -> Layer:
        """A layer as kernels take it, made once, and again if the model or the pool has other tensors or scales."""
        caches = self.link_pool.get_kv_buffer(attn.layer_id)
        scales = self._scales(attn)
        current = (id(sinks), *scales, *(cache.data_ptr() for cache in caches))
        known = self.link_layers.get(attn.layer_id)
        if known is None or known[0] != current:
            layer = self.link_model.layers[attn.layer_id].with_caches(caches, dtype, *scales, sinks)
            known = self.link_layers[attn.layer_id] = current, layer
        return known[1]

    def _scales(self, attn: Any) -> tuple[float, float]:
        """A layer's `sm_scale` and `v_scale`."""
        # The pool divides by the scales only when it rounds to fp8.
        k_scale, v_scale = kv_scales(attn) if self.link_fp8 else (1.0, 1.0)
        return attn.scaling * k_scale, v_scale


def step_rows(forward_batch: ForwardBatch) -> StepRows:
    """The rows of a decode step with one query of each request."""
    return StepRows(
        forward_batch.batch_size, forward_batch.req_pool_indices, forward_batch.seq_lens, forward_batch.seq_lens_cpu
    )


def rows_of(forward_batch: ForwardBatch) -> StepRows:
    """The rows of a decode step. A chain of drafts is verified as decode, with a row for each of its tokens."""
    rows = step_rows(forward_batch)
    if forward_batch.forward_mode.is_target_verify():
        return rows._replace(first=1, num_queries=forward_batch.spec_info.draft_token_num)
    if forward_batch.forward_mode.is_draft_extend_v2():
        num_queries = forward_batch.spec_info.num_tokens_per_req  # SGLang has counted them already
        return rows._replace(first=1 - num_queries, num_queries=num_queries)
    return rows


def with_link_path(
    backend: AttentionBackend,
    runner: Any,
    table: SegmentTable,
    model: ServedModel | None = None,
    path: type[LinkAttention] = LinkAttention,
) -> AttentionBackend:
    """Mix the link path into `backend`, which is returned.

    model: the description of the runner's model, if it is not the one that the table has.  path: what to mix in.
    """
    stock = type(backend)
    backend.__class__ = type(f"Link{stock.__name__}", (path, stock), {})
    backend.init_link_path(runner, table, model or table.model)
    return backend

"""The rows of decode batches on the link path: whole, and cut to the windows that layers have.

A chain of drafts is verified as decode, with a row for each of its tokens."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from sglang.kernels.ops.attention.kv_indices import create_flashinfer_kv_indices_triton

from sgl_kernel_lazy.rows import Rows
from sglang_lazy.attention.metadata import DecodeTables
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.model import DecodePlan, ServedModel

logger = logging.getLogger(__name__)


def copy_slots(
    req_to_token: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor | None,
    lens: torch.Tensor,
    places: torch.Tensor,
) -> None:
    """Copy slots from rows of `req_to_token` to `out`: `lens` of each row, from `starts` (None: 0), to `places`."""
    if req_to_token.is_cuda:
        create_flashinfer_kv_indices_triton[(len(rows),)](
            req_to_token, rows, lens, places, starts, out, req_to_token.stride(0)
        )
        return
    starts = torch.zeros_like(lens) if starts is None else starts
    for row, start, length, place in torch.stack([rows, starts, lens, places[: len(rows)]], dim=1).tolist():
        out[place : place + length] = req_to_token[row, start : start + length]


class PlannedRows(NamedTuple):
    """The rows of a batch for `link_decode`, and the workspace that gets their plan."""

    rows: Rows
    workspace: torch.Tensor


class QueryRows(NamedTuple):
    """What `DecodeRows` reads of a `ForwardBatch`, here with a row for each token of a step, which sees what comes
    before it in its request's row.

    batch_size: how many.
    req_pool_indices, seq_lens: [batch_size], the request's row, and how many of its tokens the query sees.
    seq_lens_cpu: the same, or None if they are on the device only.
    """

    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None

    @classmethod
    def of(cls, forward_batch: Any, first: int, num_queries: int) -> "QueryRows":
        """A batch with `num_queries` of each request, of which the first sees `first` tokens more than its `seq_lens`
        say. Does not synchronize with the device."""
        bs, on_host = forward_batch.batch_size, forward_batch.seq_lens_cpu  # what SGLang's graphs are given is longer

        def by_query(lens: torch.Tensor) -> torch.Tensor:
            seen = lens[:bs, None] + torch.arange(first, first + num_queries, device=lens.device)
            return seen.clamp(min=1).flatten()  # a request that pads the batch of a graph has one token

        return cls(
            bs * num_queries,
            forward_batch.req_pool_indices[:bs, None].expand(-1, num_queries).contiguous().view(-1),
            by_query(forward_batch.seq_lens),
            None if on_host is None else by_query(on_host),
        )


class DecodeRows:
    """Prepares decode batches: metadata for each window size, including none, and a plan for each `DecodePlan`.

    Workspaces are the table's, since those of models and of passes that run one after another may be the same memory:
    a batch is planned when the passes planned before it have been launched.

    pool: SGLang's `ReqToTokenPool`.
    model: whose layers read these rows.
    num_queries: the most tokens of a request in one step, of all passes.
    """

    def __init__(self, table: SegmentTable, pool: Any, model: ServedModel, num_queries: int = 1):
        self._table, self._pool = table, pool
        num_rows, device = pool.req_to_token.shape[0] * num_queries, table.ends.device
        plans = dict.fromkeys(layer.decode_plan for layer in model.layers.values())
        new = {
            plan: plan.kernels.decode_workspace(num_rows, table.max_segments, **plan.dims, device=device)
            for plan in plans
            if plan not in table.workspaces
        }
        _log_size("workspace for decode", new.values())
        table.workspaces |= new
        self._workspaces = {plan: table.workspaces[plan] for plan in plans}
        self._for_graphs: Mapping[int | None, DecodeTables] = {}

    def allocate_for_graphs(self, max_bs: int) -> None:
        """Allocate the metadata that CUDA graphs read, for batches of up to `max_bs` rows."""
        max_context = self._pool.req_to_token.shape[1]
        self._for_graphs = self._allocate(max_bs, max_bs * max_context)
        tensors = [tensor for tables in self._for_graphs.values() for tensor in vars(tables).values()]
        _log_size("decode metadata", tensors)

    def of(self, forward_batch: Any, for_graph: bool = False) -> dict[DecodePlan, PlannedRows]:
        """By plan, the rows of a decode batch, copied from the live tables and planned; see `unplanned`."""
        planned = self.unplanned(forward_batch, for_graph)
        for each in planned:
            plan_rows(planned, each)
        return planned

    def unplanned(self, forward_batch: Any, for_graph: bool = False) -> dict[DecodePlan, PlannedRows]:
        """By plan, the rows of a decode batch, copied from the live tables.

        forward_batch: a `ForwardBatch` or `QueryRows`. Without lengths on the host, and not for a graph, this waits for
            the device.
        """
        bs = forward_batch.batch_size
        if for_graph:
            memory = {window: tables.first(bs) for window, tables in self._for_graphs.items()}
        else:
            on_host = forward_batch.seq_lens_cpu
            memory = self._allocate(bs, int((forward_batch.seq_lens if on_host is None else on_host).sum()))
        places, seq_lens, req_to_token = forward_batch.req_pool_indices, forward_batch.seq_lens, self._pool.req_to_token
        rows = {}
        for plan in {plan.window: plan for plan in self._workspaces}.values():
            tables, whole = memory[plan.window], plan.window is None
            if whole:
                tables.fill(places, seq_lens, self._table)
                copy_slots(req_to_token, tables.kv_indices, places, None, seq_lens, tables.kv_indptr)
            else:
                tables.fill_window(places, seq_lens, self._table, req_to_token, plan)
            rows[plan.window] = tables.rows(whole=whole)
        return {plan: PlannedRows(rows[plan.window], workspace) for plan, workspace in self._workspaces.items()}

    def _allocate(self, max_bs: int, max_kv: int) -> dict[int | None, DecodeTables]:
        return {
            window: DecodeTables.allocate(
                max_bs, max_kv if window is None else min(max_kv, max_bs * window), self._table
            )
            for window in {plan.window for plan in self._workspaces}
        }


def plan_rows(rows: Mapping[DecodePlan, PlannedRows], plan: DecodePlan) -> None:
    """Write the plan of a batch's rows into its workspace: one launch, also in the capture of a graph."""
    plan.kernels.plan_decode(rows[plan].workspace, rows[plan].rows, **plan.dims)


def _log_size(what: str, tensors: Iterable[torch.Tensor]) -> None:
    if mib := round(sum(tensor.nbytes for tensor in tensors) / 2**20):
        logger.info("sglang-lazy: %d MiB of %s", mib, what)

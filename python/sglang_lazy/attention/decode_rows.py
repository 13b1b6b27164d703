"""The rows of decode batches on the link path: whole, and cut to the windows that layers have.

A chain of drafts is verified as decode, with a row for each of its tokens."""

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.tables import Queries, RowTables, WindowTables
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.model import DecodePlan, ServedModel

logger = logging.getLogger(__name__)


class PlannedRows(NamedTuple):
    """The rows of a batch for `link_decode`, and the workspace that gets their plan."""

    rows: Rows
    workspace: torch.Tensor


class StepRows(NamedTuple):
    """The rows of a decode step: of each request one for each of its queries, which sees what comes before it.

    batch_size: of requests.
    req_pool_indices, seq_lens: [batch_size] or more, the row of each request, and how many tokens it has there.
    seq_lens_cpu: the same, or None if they are on the device only.
    first: how many tokens more than `seq_lens` the first query of a request sees; each after it sees one more.
    num_queries: of each request.
    """

    batch_size: int
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor | None
    first: int = 0
    num_queries: int = 1

    @property
    def queries(self) -> Queries:
        """As kernels take them."""
        places, seq_lens = self.req_pool_indices[: self.batch_size], self.seq_lens[: self.batch_size]
        return Queries(places, seq_lens, self.first, self.num_queries)


class DecodeRows:
    """Prepares decode batches: metadata for each window size, including none, and a plan for each `DecodePlan`.

    Workspaces are the table's, since those of models and of passes that run one after another may be the same memory:
    a batch is planned when the passes planned before it have been launched.

    req_to_token: int32 [rows, width], the slots of each row; the same tensor for ever, whatever its data.
    model: whose layers read these rows.
    num_queries: the most tokens of a request in one step, of all passes.
    """

    def __init__(
        self,
        table: SegmentTable,
        req_to_token: torch.Tensor,
        model: ServedModel,
        num_queries: int = 1,
    ):
        self._table, self._context = table, req_to_token.shape[1]
        num_rows, device = req_to_token.shape[0] * num_queries, table.ends.device
        plans = dict.fromkeys(layer.decode_plan for layer in model.layers.values())
        new = {
            plan: plan.kernels.decode_workspace(num_rows, table.max_segments, **plan.dims, device=device)
            for plan in plans
            if plan not in table.workspaces
        }
        _log_size("workspace for decode", new.values())
        table.workspaces |= new
        self._workspaces = {plan: table.workspaces[plan] for plan in plans}
        self._tables = {plan.window: _tables(table, req_to_token, plan.window) for plan in plans}
        self._for_graphs: Mapping[int | None, Rows] = {}

    def allocate_for_graphs(self, max_bs: int) -> None:
        """Allocate the metadata that CUDA graphs read, for batches of up to `max_bs` rows."""
        self._for_graphs = self._allocate(max_bs, max_bs * self._context)
        tensors = [each for rows in self._for_graphs.values() for each in vars(rows).values()]
        _log_size("decode metadata", [each for each in tensors if isinstance(each, torch.Tensor)])

    def of(self, step: StepRows, for_graph: bool = False) -> dict[DecodePlan, PlannedRows]:
        """By plan, the rows of a decode batch, copied from the live tables and planned; see `unplanned`."""
        planned = self.unplanned(step, for_graph)
        for each in planned:
            plan_rows(planned, each)
        return planned

    def unplanned(self, step: StepRows, for_graph: bool = False) -> dict[DecodePlan, PlannedRows]:
        """By plan, the rows of a decode batch, copied from the live tables. Without lengths on the host, and not for a
        graph, this waits for the device."""
        queries = step.queries
        if for_graph:
            rows = {window: memory.first(queries.total) for window, memory in self._for_graphs.items()}
        else:
            on_host = step.seq_lens if step.seq_lens_cpu is None else step.seq_lens_cpu
            rows = self._allocate(queries.total, int(queries.seen(on_host[: step.batch_size]).sum()))
        for plan in {plan.window: plan for plan in self._workspaces}.values():
            fill = plan.kernels.whole_rows if plan.window is None else plan.kernels.window_rows
            fill(rows[plan.window], self._tables[plan.window], queries)
        return {plan: PlannedRows(rows[plan.window], workspace) for plan, workspace in self._workspaces.items()}

    def _allocate(self, max_bs: int, max_kv: int) -> dict[int | None, Rows]:
        """The memory of rows, which a pass reads instead of the live tables: the scheduler may rewrite those meanwhile.
        Reads are shared by whole rows only."""
        size = self._table.max_segments, self._table.ends.device
        return {
            window: Rows.allocate(max_bs, max_kv, *size)
            if window is None
            else Rows.allocate(max_bs, min(max_kv, max_bs * window), *size, shared=False)
            for window in self._tables
        }


def _tables(table: SegmentTable, req_to_token: torch.Tensor, window: int | None) -> RowTables | WindowTables:
    """The live tables, as kernels take them."""
    if window is None:
        return RowTables(
            req_to_token=req_to_token,
            num_segments=table.num_segments,
            segment_ends=table.ends,
            segment_offsets=table.offsets,
            segment_ids=table.ids,
        )
    return WindowTables(
        req_to_token=req_to_token,
        num_segments=table.num_segments,
        segment_offsets=table.offsets,
        tail_ends=table.tail_ends,
        tail_indices=table.tail_indices,
        tail_positions=table.tail_positions,
        window=window,
        window_slots=table.model.window_slots,
    )


def plan_rows(rows: Mapping[DecodePlan, PlannedRows], plan: DecodePlan) -> None:
    """Write the plan of a batch's rows into its workspace: one launch, also in the capture of a graph."""
    plan.kernels.plan_decode(rows[plan].workspace, rows[plan].rows, **plan.dims)


def _log_size(what: str, tensors: Iterable[torch.Tensor]) -> None:
    if mib := round(sum(tensor.nbytes for tensor in tensors) / 2**20):
        logger.info("sglang-lazy: %d MiB of %s", mib, what)


def deepest_paths(tokens: np.ndarray, mask: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Trees of drafts as chains of as many tokens: of each the deepest path, and any tokens after it.

    tokens: [bs * num_nodes], a node after its parent.  mask: [bs * num_nodes * num_nodes], what each node sees.
    """
    trees = mask.reshape(-1, num_nodes, num_nodes)
    chains = tokens.reshape(-1, num_nodes).copy()
    for chain, tree in zip(chains, trees, strict=True):
        path = chain[tree[tree.sum(1).argmax()].astype(bool)]
        chain[: len(path)] = path
    return chains.reshape(tokens.shape), np.broadcast_to(np.tri(num_nodes, dtype=mask.dtype), trees.shape).flatten()

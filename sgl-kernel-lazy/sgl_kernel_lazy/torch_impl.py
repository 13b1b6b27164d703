"""Linked attention in plain PyTorch: the readable implementation, and the one that serves on CPU."""

from collections.abc import Callable, Iterator

import torch

from sgl_kernel_lazy.contract import check_positions, check_reads, check_sums, fingerprint
from sgl_kernel_lazy.layer import Layer, LayerKind, check_queries, check_sums_and_queries
from sgl_kernel_lazy.row_attention import Row, attend, masked_scores, rows_of
from sgl_kernel_lazy.rows import ExtendRows, Rows
from sgl_kernel_lazy.torch_copy_rotated import copy_rotated as copy_rotated
from sgl_kernel_lazy.torch_link_states import link_states as link_states
from sgl_kernel_lazy.torch_whole_rows import whole_rows as whole_rows
from sgl_kernel_lazy.torch_window_rows import window_rows as window_rows

# Elements of the score matrix of one step: 64 MiB of float32.
MAX_SCORES = 1 << 24


def unsupported(device: torch.device, kind: LayerKind, max_segments: int) -> str | None:
    """Why this implementation cannot serve such a layer on this device, or None; always None here.

    max_segments: of a request, the width of the segment tables.
    """
    return None


def decode_workspace(
    max_bs: int,
    max_segments: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> torch.Tensor:
    """What `plan_decode` and `link_decode` need for batches of up to max_bs requests of up to max_segments segments.

    This implementation needs no plan. It keeps a fingerprint of the planned batch, to refuse any other.
    """
    return torch.full((1,), torch.nan, dtype=torch.float64, device=device)  # holds 32 bits; no batch's before a plan


def plan_decode(
    workspace: torch.Tensor | None,
    rows: Rows,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Prepare the workspace for a batch, once per step and before all layers.

    rows: with `segment_ids` where reads may be shared.
    Raises ValueError if the workspace is too small.
    """
    if workspace is not None:
        workspace.fill_(fingerprint(rows, (num_qo_heads, num_kv_heads, head_dim)))


def link_decode(
    q: torch.Tensor,
    layer: Layer,
    rows: Rows,
    *,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[b] = sum_j softmax_j(sm_scale < R(-p_j) q[b], k_j >) v_j over all KV tokens j of request b's row.

    p_j is the offset of the chunk segment that holds KV token j, whose key is stored at its local position; it is 0 for
    text, stored at absolute positions.

    q: [bs, num_qo_heads, head_dim], rotated by its absolute position; rows may be strided.
    layer, rows: the caches and the KV tokens of each request; layers with one window share the rows.
    workspace: from `decode_workspace`, with this batch planned by `plan_decode`; None: made here.
    out, lse: written when given; lse is [bs, num_qo_heads] fp32, natural log, of the KV tokens without the sink.
    Returns out. A request without KV tokens gives a zero row and lse -inf.
    Raises ValueError on a shape, dtype, device or stride mismatch. Other preconditions are checked by this
    implementation only (`contract.py`).
    """
    check_queries(q, layer, rows, out, lse)
    if workspace is not None and workspace.item() != fingerprint(rows, layer.dims):
        raise ValueError("workspace: expected the plan of this batch, got that of another")
    check_reads(rows, layer)

    def sees_all(row: Row, queries: slice) -> torch.Tensor:
        return torch.ones(queries.stop - queries.start, len(row.slots), dtype=torch.bool, device=q.device)

    return _attend(q, layer, rows, list(range(rows.bs + 1)), sees_all, out, lse)


def link_extend(
    q: torch.Tensor, layer: Layer, rows: ExtendRows, *, out: torch.Tensor | None = None, lse: torch.Tensor | None = None
) -> torch.Tensor:
    """`link_decode` for a ragged batch of query rows, each of which sees the KV tokens with kv_position <= q_position.

    q: [nnz_qo, num_qo_heads, head_dim], as `rows` says. kv_positions ascend strictly within each chunk segment, within
        the cached text, and within the new text, which is the last qo_len tokens of a row.
    layer: if it has a window, a query row sees only those with kv_position > q_position - window.
    Where queries are not KV tokens of their rows, as in cross attention, positions ascend strictly throughout a row.
    The keys and values of the new tokens are in the cache already. Other arguments, results and errors: `link_decode`;
    a row that sees nothing gives zeros and lse -inf.
    """
    check_queries(q, layer, rows, out, lse)
    check_reads(rows, layer)
    check_positions(rows)
    kv_positions, q_positions, window = rows.kv_positions, rows.q_positions, layer.window

    def sees(row: Row, queries: slice) -> torch.Tensor:
        visible = kv_positions[row.begin : row.end] <= q_positions[queries, None]
        if window is not None:
            visible &= kv_positions[row.begin : row.end] > q_positions[queries, None] - window
        return visible

    return _attend(q, layer, rows, rows.qo_indptr.tolist(), sees, out, lse)


def _attend(
    q: torch.Tensor,
    layer: Layer,
    rows: Rows,
    qo_indptr: list[int],
    sees: Callable[[Row, slice], torch.Tensor],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """sees: which KV tokens of a row queries see, bool [n_q, n]. Other arguments and results: `link_extend`."""
    sm_scale, logit_cap, sinks = layer.sm_scale, layer.logit_cap, layer.sinks
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for b, row in enumerate(rows_of(rows)):
        keys, values = row.keys(layer), row.values(layer)
        for queries in _steps(qo_indptr[b], qo_indptr[b + 1], q.shape[1] * len(row.slots)):
            visible = sees(row, queries)
            result = attend(q[queries], keys, values, visible, sm_scale, logit_cap) * layer.v_scale
            if lse is not None or sinks is not None:
                sums = masked_scores(q[queries], keys, visible, sm_scale, logit_cap).logsumexp(-1)
            if sinks is not None:
                result *= torch.sigmoid(sums - sinks)[..., None]
            out[queries] = result
            if lse is not None:
                lse[queries] = sums
    return out


def accumulate_attention(sums: torch.Tensor, q: torch.Tensor, layer: Layer, rows: ExtendRows) -> None:
    """sums[j] += sum over the query rows i and heads h of request b of softmax_j(sm_scale < R(-p_j) q[i, h], k_j >),
    for all KV tokens j of request b's row: how much attention each of them gets.

    sums: [>= kv_indptr[-1]] fp32, in the order of kv_indices; added to in place, so that it can gather several layers.
    q: [nnz_qo, num_qo_heads, head_dim], only the rows that count: any rows, also none, at any positions. Unlike in
        `link_extend` they need not be the last tokens of the request's row, and the text may be in any order.
    Other arguments and errors: `link_extend`. A query row sees the KV tokens with kv_position <= q_position, and one
    that sees nothing adds nothing. The same call gives the same bits.
    """
    check_sums_and_queries(sums, q, layer, rows)
    check_sums(sums, rows)
    check_reads(rows, layer)
    qo = rows.qo_indptr.tolist()
    for b, row in enumerate(rows_of(rows)):
        keys = row.keys(layer)
        for queries in _steps(qo[b], qo[b + 1], q.shape[1] * len(row.slots)):
            visible = rows.kv_positions[row.begin : row.end] <= rows.q_positions[queries, None]
            sees = visible.any(1)
            scores = masked_scores(q[queries][sees], keys, visible[sees], layer.sm_scale, layer.logit_cap)
            totals = scores.logsumexp(-1, keepdim=True)
            if layer.sinks is not None:
                totals = totals.logaddexp(layer.sinks[:, None].float())
            sums[row.begin : row.end] += (scores - totals).exp().sum((0, 1))


def _steps(begin: int, end: int, scores_per_row: int) -> Iterator[slice]:
    """The query rows begin .. end in steps of at most MAX_SCORES scores."""
    step = max(1, MAX_SCORES // max(1, scores_per_row))
    for first in range(begin, end, step):
        yield slice(first, min(first + step, end))

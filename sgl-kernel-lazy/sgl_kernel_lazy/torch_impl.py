"""Linked attention in plain PyTorch: the readable implementation, and the one that serves on CPU."""

from collections.abc import Iterator

import torch

from sgl_kernel_lazy.contract import (
    check_positions,
    check_queries,
    check_reads,
    check_segments,
    check_shared_segments,
    fingerprint,
)
from sgl_kernel_lazy.row_attention import attend, masked_scores, rows_of
from sgl_kernel_lazy.torch_copy_rotated import copy_rotated as copy_rotated
from sgl_kernel_lazy.torch_link_states import link_states as link_states
from sgl_kernel_lazy.torch_window_rows import window_rows as window_rows
from sgl_kernel_lazy.validation import (
    check_accumulate_inputs,
    check_decode_inputs,
    check_extend_inputs,
    check_rows,
)

# Elements of the score matrix of one step: 64 MiB of float32.
MAX_SCORES = 1 << 24


def unsupported(
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    max_segments: int,
    windowed: bool,
    sinks: bool,
    capped: bool,
) -> str | None:
    """Why this implementation cannot serve such a layer here, or None; always None here.

    kv_dtype: dtype, or fp8.
    max_segments: of a request, the width of the segment tables.
    windowed, sinks, capped: whether it has a window, sinks, or a logit cap.
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
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_offsets: torch.Tensor,
    segment_ids: torch.Tensor | None,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Prepare the workspace for a batch, once per step and before all layers; arguments as for `link_decode`.

    segment_ids: [bs, max_segments] int32, not read beyond num_segments; None: nothing is shared. Segments of one id,
        at least 0, list the same slots in the same order, so that their keys can be read once for all requests; -1 is
        shared with nobody. A segment that reaches the end of its row is not shared either, whatever its id: rows end
        with the query's own token, which is text, so it is a leftover in a row that pads the batch.
    Raises ValueError on a shape, dtype, device or stride mismatch. Other preconditions, of this op and the others, are
    checked by this implementation only (`contract.py`).
    """
    check_rows(kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids, num_segments.device)
    check_segments(kv_indptr, len(kv_indices), num_segments, segment_ends, padded=True)
    if segment_ids is not None:
        check_shared_segments(kv_indptr, kv_indices, num_segments, segment_ends, segment_ids)
    if workspace is not None:
        planned = (kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets)
        workspace.fill_(fingerprint(*planned, (num_qo_heads, num_kv_heads, head_dim)))


def link_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_offsets: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    is_neox: bool,
    sm_scale: float,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    logit_cap: float | None = None,
    segment_ids: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[b] = sum_j softmax_j(sm_scale < R(-p_j) q[b], k_j >) v_j over all KV tokens j of request b's row.

    A request's row lists its chunk segments in prompt order, then its text. p_j is the offset of the chunk segment
    that holds KV token j, whose key is stored at its local position; it is 0 for text, stored at absolute positions.
    Text may be a segment, too. Where a layer has a window, a row lists what is in it.

    q: [bs, num_qo_heads, head_dim], fp32, fp16 or bf16, rotated by its absolute position; rows may be strided.
    k_cache, v_cache: [num_slots, num_kv_heads, head_dim], both in q's dtype or in fp8 (e4m3fn, e5m2), which is widened
        without loss. At most 2**31 slots.
    kv_indptr: [bs + 1] int32, counts tokens.  kv_indices: [>= kv_indptr[-1]] int32 or int64, slots.
    num_segments: [bs] int32, 0 for an ordinary request.
    segment_ends: [bs, max_segments] int32, in KV tokens of the request's row; segment i begins where i - 1 ended. In
        decode alone they may exceed the row, which cuts them off, as leftovers in rows that pad the batch do.
    segment_offsets: [bs, max_segments] int32, rows of cos_sin_cache. The offset of a segment is -j if its keys are
        stored at positions larger than its tokens' own by j; that is row len(cos_sin_cache) - j. Neither table is read
        beyond num_segments.
    cos_sin_cache: [num_rows, rotary_dim] fp32, with rows for negative offsets where there are any: see `rope_cos_sin`.
    sm_scale: what scores are multiplied by, positive.
    v_scale: what fp8 values were divided by when they were stored; out is multiplied by it. For keys that were divided
        by a scale, multiply sm_scale by it.
    sinks: [num_qo_heads], fp32, fp16 or bf16: a score of each head that takes part in its softmax, without a value.
    logit_cap: a positive bound c on scores, each of which is c tanh(score / c); not on sinks.
    segment_ids: as for `plan_decode`; used only where workspace is None.
    workspace: from `decode_workspace`, with this batch planned by `plan_decode`; None: made here.
    out, lse: written when given; lse is [bs, num_qo_heads] fp32, natural log, of the KV tokens without the sink.
    Returns out. A request without KV tokens gives a zero row and lse -inf.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """
    check_decode_inputs(
        q, k_cache, v_cache, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, cos_sin_cache,
        out, lse, sm_scale, v_scale, sinks, logit_cap, segment_ids,
    )  # fmt: skip
    planned = (kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets)
    dims = (q.shape[1], k_cache.shape[1], q.shape[2])
    if workspace is None:
        plan_decode(None, *planned, segment_ids, num_qo_heads=dims[0], num_kv_heads=dims[1], head_dim=dims[2])
    elif workspace.item() != fingerprint(*planned, dims):
        raise ValueError("workspace: expected the plan of this batch, got that of another")
    check_reads(kv_indptr, kv_indices, num_segments, segment_offsets, len(k_cache), len(cos_sin_cache))
    # An extend of one query row per request, which sees all of it.
    nowhere = torch.zeros(max(len(q), len(kv_indices)), dtype=torch.int32, device=q.device)
    return link_extend(
        q, k_cache, v_cache, torch.arange(len(q) + 1), nowhere, kv_indptr, kv_indices, nowhere, num_segments,
        segment_ends, segment_offsets, cos_sin_cache, max_extend_len=1, is_neox=is_neox, sm_scale=sm_scale,
        v_scale=v_scale, sinks=sinks, logit_cap=logit_cap, out=out, lse=lse, validate=False,
    )  # fmt: skip


def link_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    q_positions: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_positions: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_offsets: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    max_extend_len: int,
    is_neox: bool,
    sm_scale: float,
    v_scale: float = 1.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    logit_cap: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    validate: bool = True,
) -> torch.Tensor:
    """`link_decode` for a ragged batch of query rows, each of which sees the KV tokens with kv_position <= q_position.

    q: [nnz_qo, num_qo_heads, head_dim]; the rows of request b are qo_indptr[b] .. qo_indptr[b + 1].
    qo_indptr: [bs + 1] int32.  q_positions: [nnz_qo] int32 or int64, absolute.
    kv_positions: [>= kv_indptr[-1]] int32, absolute position of each KV token of kv_indices. They ascend strictly
        within each chunk segment, within the cached text, and within the new text, which is the last qo_len tokens of a
        row.
    max_extend_len: the longest qo_len of the batch, known on the host.
    window: how many positions a query row sees, its own included: those with kv_position > q_position - window.
    validate: False skips the checks of arguments, which cost as much host time as a layer's launches: for calls that
        differ from a checked one only in the contents of q, the caches, cos_sin_cache and out, as the layers of a model
        do.
    Where the queries are no KV tokens of their rows, as in cross attention, positions ascend strictly throughout a row.
    The keys and values of the new tokens are in the cache already. Other arguments, results and errors: `link_decode`;
    a row that sees nothing gives zeros and lse -inf.
    """
    if validate:
        check_extend_inputs(
            q, k_cache, v_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
            num_segments, segment_ends, segment_offsets, cos_sin_cache, max_extend_len, out, lse, sm_scale,
            v_scale, window, sinks, logit_cap,
        )  # fmt: skip
        check_queries(qo_indptr, len(q), max_extend_len)
        check_segments(kv_indptr, min(len(kv_indices), len(kv_positions)), num_segments, segment_ends)
        check_reads(kv_indptr, kv_indices, num_segments, segment_offsets, len(k_cache), len(cos_sin_cache))
        check_positions(qo_indptr, kv_indptr, kv_positions, num_segments, segment_ends)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    qo = qo_indptr.tolist()
    for b, row in enumerate(rows_of(kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets)):
        keys, values = row.keys(k_cache, cos_sin_cache, is_neox), row.values(v_cache)
        for rows in _steps(qo[b], qo[b + 1], q.shape[1] * len(row.slots)):
            visible = kv_positions[row.begin : row.end] <= q_positions[rows, None]
            if window is not None:
                visible &= kv_positions[row.begin : row.end] > q_positions[rows, None] - window
            result = attend(q[rows], keys, values, visible, sm_scale, logit_cap) * v_scale
            if lse is not None or sinks is not None:
                sums = masked_scores(q[rows], keys, visible, sm_scale, logit_cap).logsumexp(-1)
            if sinks is not None:
                result *= torch.sigmoid(sums - sinks)[..., None]
            out[rows] = result
            if lse is not None:
                lse[rows] = sums
    return out


def accumulate_attention(
    sums: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    q_positions: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_positions: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_offsets: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    max_extend_len: int,
    is_neox: bool,
    sm_scale: float,
    sinks: torch.Tensor | None = None,
    logit_cap: float | None = None,
    validate: bool = True,
) -> None:
    """sums[j] += sum over the query rows i and heads h of request b of softmax_j(sm_scale < R(-p_j) q[i, h], k_j >),
    for all KV tokens j of request b's row: how much attention each of them gets.

    sums: [>= kv_indptr[-1]] fp32, in the order of kv_indices; added to in place, so that it can gather several layers.
    q: [nnz_qo, num_qo_heads, head_dim], only the rows that count: any rows, also none, at any positions. Unlike in
        `link_extend` they need not be the last tokens of the request's row, and the text may be in any order.
    Other arguments and errors: `link_extend`. A query row sees the KV tokens with kv_position <= q_position, and one
    that sees nothing adds nothing. The same call gives the same bits.
    """
    if validate:
        check_accumulate_inputs(
            sums, q, k_cache, qo_indptr, q_positions, kv_indptr, kv_indices, kv_positions,
            num_segments, segment_ends, segment_offsets, cos_sin_cache, max_extend_len, sm_scale, sinks, logit_cap,
        )  # fmt: skip
        check_queries(qo_indptr, len(q), max_extend_len)
        most = min(len(sums), len(kv_indices), len(kv_positions))
        check_segments(kv_indptr, most, num_segments, segment_ends)
        check_reads(kv_indptr, kv_indices, num_segments, segment_offsets, len(k_cache), len(cos_sin_cache))
    qo = qo_indptr.tolist()
    for b, row in enumerate(rows_of(kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets)):
        keys = row.keys(k_cache, cos_sin_cache, is_neox)
        for rows in _steps(qo[b], qo[b + 1], q.shape[1] * len(row.slots)):
            visible = kv_positions[row.begin : row.end] <= q_positions[rows, None]
            sees = visible.any(1)
            scores = masked_scores(q[rows][sees], keys, visible[sees], sm_scale, logit_cap)
            totals = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                totals = totals.logaddexp(sinks[:, None].float())
            sums[row.begin : row.end] += (scores - totals).exp().sum((0, 1))


def _steps(begin: int, end: int, scores_per_row: int) -> Iterator[slice]:
    """The query rows begin .. end in steps of at most MAX_SCORES scores."""
    step = max(1, MAX_SCORES // max(1, scores_per_row))
    for first in range(begin, end, step):
        yield slice(first, min(first + step, end))

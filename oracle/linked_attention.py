"""The formula of linked attention, row by row with an explicit mask: the reference for all implementations."""

from collections.abc import Iterator
from typing import Any

import torch

from sgl_kernel_lazy.rope import rotate_queries


def _scores(
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
    is_neox: bool,
    sm_scale: float,
    dtype: torch.dtype,
    window: int | None = None,
    logit_cap: float | None = None,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield, for each query row that sees anything, its index, the KV tokens j that it sees, and the scores
    sm_scale < R(-p_j) q, k_j >, which a logit cap c turns into c tanh(score / c).

    KV tokens are given by index into kv_indices [n] and by slot [n]; scores are [num_qo_heads, n], in `dtype`.
    p_j is the offset of the chunk segment that KV token j belongs to, and 0 for text.
    """
    group = q.shape[1] // k_cache.shape[1]
    for b in range(len(kv_indptr) - 1):
        begin, end = int(kv_indptr[b]), int(kv_indptr[b + 1])
        offsets = torch.zeros(end - begin, dtype=torch.long, device=q.device)
        segment_begin = 0
        for i in range(int(num_segments[b])):
            segment_end = int(segment_ends[b, i])
            offsets[segment_begin:segment_end] = int(segment_offsets[b, i])
            segment_begin = segment_end
        slots = kv_indices[begin:end].long()
        keys = k_cache[slots].to(dtype).repeat_interleave(group, dim=1)
        for row in range(int(qo_indptr[b]), int(qo_indptr[b + 1])):
            visible = kv_positions[begin:end] <= q_positions[row]
            if window is not None:
                visible &= kv_positions[begin:end] > q_positions[row] - window
            if not visible.any():
                continue
            wide = q[row].to(torch.promote_types(dtype, torch.float32)).expand(int(visible.sum()), -1, -1)
            queries = rotate_queries(wide, offsets[visible], cos_sin_cache, is_neox=is_neox, inverse=True).to(dtype)
            scores = torch.einsum("nhd,nhd->hn", queries, keys[visible]) * sm_scale
            if logit_cap is not None:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            yield row, begin + visible.nonzero().squeeze(1), slots[visible], scores


def naive_link_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *rows_and_table: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_j softmax_j(sm_scale < R(-p_j) q, k_j >) v_j over the KV tokens j with kv_position_j <= q_position, and
    kv_position_j > q_position - window if there is a window. A sink is an additional score of its head without a value.

    Everything after the rotation is computed in `dtype`: float64 gives the oracle, the inputs' own dtype plain PyTorch.
    Returns out [nnz_qo, num_qo_heads, head_dim] and lse [nnz_qo, num_qo_heads], both in `dtype`.
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=dtype, device=q.device)
    group = q.shape[1] // k_cache.shape[1]
    for row, _, slots, scores in _scores(q, k_cache, *rows_and_table, dtype=dtype, **options):
        values = v_cache[slots].to(dtype).repeat_interleave(group, dim=1)
        out[row] = torch.einsum("hn,nhd->hd", _weights(scores, sinks), values)
        lse[row] = scores.logsumexp(dim=-1)
    return out, lse


def naive_link_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    *segments_and_table: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`naive_link_extend` with one query row per request, which sees all its KV tokens; also returns (out, lse)."""
    rows = torch.arange(len(q) + 1)
    position = torch.zeros(max(len(q), len(kv_indices)), dtype=torch.int32, device=q.device)
    return naive_link_extend(
        q, k_cache, v_cache, rows, position, kv_indptr, kv_indices, position, *segments_and_table, **options
    )


def naive_accumulate_attention(
    sums: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    *rows_and_table: torch.Tensor,
    sinks: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """sums[j] += sum of softmax_j(sm_scale < R(-p_j) q, k_j >) over the query rows q and heads of KV token j's request.

    sums: [>= kv_indptr[-1]]; everything after the rotation is computed in its dtype.
    """
    for _, seen, _, scores in _scores(q, k_cache, *rows_and_table, dtype=sums.dtype, **options):
        sums[seen] += _weights(scores, sinks).sum(dim=0)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores [num_qo_heads, n], in which sinks, one per head, take part."""
    if sinks is None:
        return scores.softmax(dim=-1)
    return torch.cat([scores, sinks[:, None].to(scores.dtype)], dim=-1).softmax(dim=-1)[:, :-1]

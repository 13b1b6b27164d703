"""Attention over the row of one request in plain PyTorch, of which `torch_impl` is made."""

from collections.abc import Iterator, Sequence

import torch

from sgl_kernel_lazy.rope import rotate_queries


def row_runs(
    kv_indptr: Sequence[int], num_segments: torch.Tensor, segment_ends: torch.Tensor, segment_offsets: torch.Tensor
) -> Iterator[list[tuple[int, int, int]]]:
    """Per request, the half-open runs (begin, end, offset) of its row: its chunk segments, then its text."""
    ends, offsets = segment_ends.tolist(), segment_offsets.tolist()
    for b, count in enumerate(num_segments.tolist()):
        bounds = [0, *ends[b][:count], kv_indptr[b + 1] - kv_indptr[b]]
        yield list(zip(bounds, bounds[1:], [*offsets[b][:count], 0], strict=False))


def cached_rows(cache: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The cache rows of these slots as [num_kv_heads, n, head_dim], in the type that everything is computed in.

    That is wider than dtype, the queries', so that only the results are rounded to it: float32, or float64 for float32.
    """
    return cache[slots].to(torch.float64 if dtype == torch.float32 else torch.float32).transpose(0, 1)


def softmax_weights(
    q: torch.Tensor,
    keys: torch.Tensor,
    runs: list[tuple[int, int, int]],
    visible: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax weights, not yet normalised, of q [n_q, num_qo_heads, head_dim] for keys [num_kv_heads, n, head_dim].

    keys: from `cached_rows`.  visible: bool [n_q, n], or None where every row sees every KV token.
    Returns weights [num_kv_heads, n_q * group, n] = exp(score - row_max), row_max, and row_sum, the sum of the weights,
    both [num_kv_heads, n_q * group, 1], in the type of keys.
    """
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_qo_heads // num_kv_heads
    wide = q.to(keys.dtype)
    scores = wide.new_empty(num_kv_heads, num_rows * group, num_keys)
    for begin, end, offset in runs:
        if begin < end:
            rotated = rotate_queries(wide, offset, cos_sin_cache, is_neox=is_neox, inverse=True) if offset else wide
            rotated = rotated.reshape(num_rows, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
            scores[:, :, begin:end] = rotated @ keys[:, begin:end].mT
    scores *= sm_scale
    if visible is not None:
        scores.view(num_kv_heads, num_rows, group, num_keys).masked_fill_(~visible[:, None], float("-inf"))
    row_max = scores.amax(-1, keepdim=True) if num_keys else scores.new_full((*scores.shape[:2], 1), -torch.inf)
    # A row that sees nothing has the maximum -inf; subtracting 0 instead keeps its weights exp(-inf) = 0.
    weights = scores.sub_(row_max.masked_fill(row_max == -torch.inf, 0.0)).exp_()
    return weights, row_max, weights.sum(dim=-1, keepdim=True)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: list[tuple[int, int, int]],
    visible: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
    sm_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over keys and values from `cached_rows`; other arguments as for `softmax_weights`.

    Returns out [n_q, num_qo_heads, head_dim] in q's dtype and lse [n_q, num_qo_heads] in the type of keys.
    """
    weights, row_max, row_sum = softmax_weights(q, keys, runs, visible, cos_sin_cache, is_neox, sm_scale)
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads = len(keys)
    out = (weights @ values / row_sum.masked_fill(row_sum == 0, 1.0)).view(num_kv_heads, num_rows, -1, head_dim)
    lse = (row_max + row_sum.log()).view(num_kv_heads, num_rows, -1)
    return out.transpose(0, 1).reshape(q.shape).to(q.dtype), lse.transpose(0, 1).reshape(num_rows, num_qo_heads)

"""Attention over the row of one request in plain PyTorch: the building block of `torch_impl`.

Since < R(-p) q, k > = < q, R(p) k >, cached keys are rotated on to their places in the prompt, which leaves ordinary
attention: cheaper here than rotating all queries back for each segment, as PyTorch has to copy the row's keys anyway.
Everything is computed in float32 on a CPU, where this serves, and in float64 on GPUs, where it is what kernels are
compared with: matrix products in float32 add up head_dim numbers one by one, at twice the error of sums in a tree.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rope import rotate_queries
from sgl_kernel_lazy.rows import Rows


class Row(NamedTuple):
    """The KV tokens of a request.

    begin, end: where they are in `kv_indices`.
    slots: of the cache.
    offsets: int64, by how many positions each key has to be rotated.
    """

    begin: int
    end: int
    slots: torch.Tensor
    offsets: torch.Tensor

    def keys(self, layer: Layer) -> torch.Tensor:
        """[num_kv_heads, n, head_dim] fp32 or fp64, rotated by their positions in the prompt."""
        keys = _widened(layer.k_cache[self.slots])
        return rotate_queries(keys, self.offsets, layer.cos_sin_cache, is_neox=layer.is_neox).transpose(0, 1)

    def values(self, layer: Layer) -> torch.Tensor:
        """[num_kv_heads, n, head_dim] fp32 or fp64."""
        return _widened(layer.v_cache[self.slots]).transpose(0, 1)


def _widened(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.device.type == "cpu" else x.double()


def rows_of(rows: Rows) -> Iterator[Row]:
    """The row of each request: its chunk segments, then its text, which has offset 0."""
    indptr = rows.kv_indptr.tolist()
    for b, count in enumerate(rows.num_segments.tolist()):
        begin, end = indptr[b], indptr[b + 1]
        # Leftovers in rows that pad the batch are cut off.
        ends = rows.segment_ends[b, :count].clamp(max=end - begin)
        lens = torch.tensor([0, *ends.tolist(), end - begin]).diff()
        offsets = torch.tensor([*rows.segment_offsets[b, :count].tolist(), 0]).repeat_interleave(lens)
        yield Row(begin, end, rows.kv_indices[begin:end], offsets.to(rows.device))


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    sm_scale: float,
    logit_cap: float | None,
) -> torch.Tensor:
    """Attention of q [n_q, num_qo_heads, head_dim] over keys and values of a `Row`; zero where nothing is visible.

    visible: bool [n_q, n].  Returns [n_q, num_qo_heads, head_dim] in the type of keys and values.
    """
    if not keys.shape[1]:  # PyTorch would give what is in q
        return keys.new_zeros(q.shape)
    if logit_cap is not None:
        weights = masked_scores(q, keys, visible, sm_scale, logit_cap).softmax(-1)
        weights = weights.masked_fill(~visible[:, None], 0.0)  # NaN where nothing is visible
        return torch.einsum("qhgn,hnd->qhgd", weights.unflatten(1, (len(keys), -1)), values).flatten(1, 2)
    by_head = q.to(keys.dtype).transpose(0, 1)
    out = scaled_dot_product_attention(
        by_head[None], keys[None], values[None], attn_mask=visible, scale=sm_scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def masked_scores(
    q: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, sm_scale: float, logit_cap: float | None
) -> torch.Tensor:
    """sm_scale < q, k >, capped, and -inf where k is not visible: [n_q, num_qo_heads, n] in the type of keys; arguments
    as for `attend`."""
    by_kv_head = q.to(keys.dtype).unflatten(1, (len(keys), -1))
    scores = torch.einsum("qhgd,hnd->qhgn", by_kv_head, keys).flatten(1, 2) * sm_scale
    if logit_cap is not None:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    return scores.masked_fill(~visible[:, None], float("-inf"))

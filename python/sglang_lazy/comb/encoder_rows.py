"""Self-attention of the encoder over a batch of chunks."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rows import ExtendRows
from sglang_lazy.core.device import ints_to_device
from sglang_lazy.core.model import LayerRope


class EncoderRows:
    """Concatenated chunks, each of which attends to itself only.

    positions: int64 [number of tokens], relative to each chunk's beginning.
    """

    def __init__(self, lens: Sequence[int], causal: bool, kernels: ModuleType, rope: LayerRope):
        """rope: with angles of zero, since the model has rotated queries and keys already."""
        self._kernels, self._rope = kernels, rope
        device, positions = rope.cos_sin_cache.device, np.concatenate([np.arange(n) for n in lens])
        last = np.repeat(np.array(lens) - 1, lens)
        indptr, kv_positions, q_positions, kv_indices, none = ints_to_device(
            [
                np.cumsum([0, *lens]),
                positions,
                positions if causal else last,
                np.arange(len(positions)),
                np.zeros(len(lens)),
            ],
            device,
        )
        self.positions = kv_positions.to(torch.int64)
        self._rows = ExtendRows(
            kv_indptr=indptr,
            kv_indices=kv_indices,
            num_segments=none,
            segment_ends=none[:, None],
            segment_offsets=none[:, None],
            qo_indptr=indptr,
            q_positions=q_positions,
            kv_positions=kv_positions,
            max_extend_len=max(lens),
        )

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """Attention output.  q: [number of tokens, num_qo_heads, head_dim]; k, v: with num_kv_heads instead."""
        layer = Layer(
            num_qo_heads=q.shape[1],
            dtype=q.dtype,
            k_cache=k,
            v_cache=v,
            cos_sin_cache=self._rope.cos_sin_cache,
            is_neox=self._rope.is_neox,
            sm_scale=sm_scale,
        )
        return self._kernels.link_extend(q, layer, self._rows)


class ChunkAttention(torch.nn.Module):
    """Attention of an encoder layer: each chunk attends to itself, without a KV cache."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scaling: float):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.scaling = num_heads, num_kv_heads, head_dim, scaling

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: EncoderRows) -> torch.Tensor:
        """q, k, v: of all tokens, whatever their shape."""
        q = q.view(-1, self.num_heads, self.head_dim)
        k, v = (x.view(-1, self.num_kv_heads, self.head_dim) for x in (k, v))
        return rows.attend(q, k, v, self.scaling).flatten(1)

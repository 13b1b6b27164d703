"""Self-attention of the encoder over a batch of chunks."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from sglang_lazy.core.device import ints_to_device
from sglang_lazy.core.model import LayerRope


class EncoderRows:
    """Concatenated chunks, each of which attends to itself only.

    positions: int64 [number of tokens], relative to each chunk's beginning.
    """

    def __init__(self, lens: Sequence[int], causal: bool, kernels: ModuleType, rope: LayerRope):
        """rope: with angles of zero, since the model has rotated queries and keys already."""
        self._kernels, self._rope, self._max_len = kernels, rope, max(lens)
        device, positions = rope.cos_sin_cache.device, np.concatenate([np.arange(n) for n in lens])
        last = np.repeat(np.array(lens) - 1, lens)
        self._indptr, self._positions, self._q_positions, self._indices, self._none = ints_to_device(
            [
                np.cumsum([0, *lens]),
                positions,
                positions if causal else last,
                np.arange(len(positions)),
                np.zeros(len(lens)),
            ],
            device,
        )
        self.positions = self._positions.to(torch.int64)
        self._checked = False

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sm_scale: float) -> torch.Tensor:
        """Attention output.  q: [number of tokens, num_qo_heads, head_dim]; k, v: with num_kv_heads instead."""
        out = self._kernels.link_extend(
            q,
            k,
            v,
            self._indptr,
            self._q_positions,
            self._indptr,
            self._indices,
            self._positions,
            self._none,
            self._none[:, None],
            self._none[:, None],
            self._rope.cos_sin_cache,
            max_extend_len=self._max_len,
            is_neox=self._rope.is_neox,
            sm_scale=sm_scale,
            validate=not self._checked,
        )
        self._checked = True
        return out

"""Layers of Mamba-2, whose transitions are numbers: the products of their tokens' decays."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

Scan = Callable[[torch.Tensor], torch.Tensor]
"""The layer's kernel: from the states before the pieces, [num_pieces, heads, P, N], to those after them."""


class Mamba2:
    """See `passes.Layer`; V and K are called P and N here.

    decays: fp32 [num_pieces, heads], the logarithm of each piece's, from `log_decays`.
    """

    def __init__(self, scan: Scan, decays: torch.Tensor):
        self._scan, self._decays = scan, decays

    def run(self, states: torch.Tensor) -> torch.Tensor:
        return self._scan(states)

    def run_with_transitions(
        self, states: torch.Tensor, transitions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._scan(states), transitions * self._decays.exp()

    def identity(self, states: torch.Tensor) -> torch.Tensor:
        return states.new_ones(states.shape[:2])


def log_decays(
    dt: torch.Tensor, A: torch.Tensor, dt_bias: torch.Tensor | None, cu_seqlens: torch.Tensor
) -> torch.Tensor:
    """The logarithm of how much each piece lets states decay, fp32 [num_pieces, heads].

    dt: [num_tokens, heads], as it is given to the kernel.  A, dt_bias: [heads].  cu_seqlens: [num_pieces + 1].
    """
    steps = F.softplus(dt.float() + (0 if dt_bias is None else dt_bias.float()))
    sums = F.pad((steps * A.float()).double().cumsum(0), (0, 0, 1, 0))[cu_seqlens]  # a piece's own is a difference
    return sums.diff(dim=0).float()


def blocks(lens: Sequence[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the kernel's blocks of `size` tokens begin, or sequences of these lengths within them: the index of each
    one's block and its offset in that. int64 each."""
    ends = np.cumsum(lens)
    begins = np.union1d(np.arange(0, ends[-1], size), ends[:-1])
    return begins // size, begins % size

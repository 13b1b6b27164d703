"""Layers with a gated delta rule, whose transitions are matrices."""

import functools
from collections.abc import Callable

import torch

Extend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""The layer's kernel: values [1, num_tokens, heads, any] and states [num_pieces, heads, any, K], which it replaces by
those after the pieces. Returns outputs of the values' shape."""


class DeltaRule:
    """See `passes.Layer`. A state is kept as [V, K], and a step is X (I - b k k^T) a + b v k^T: to values of zero, the
    state's rows are any rows. So a state of the identity below the layer's own becomes the transition.

    values: [1, num_tokens, heads, V].
    """

    _outputs: torch.Tensor

    def __init__(self, extend: Extend, values: torch.Tensor):
        self._extend, self._values = extend, values

    @property
    def outputs(self) -> torch.Tensor:
        """Those of the last run, of the values' shape. They are contiguous: the norm behind them reads their rows one
        after another, whatever their strides."""
        return self._outputs.contiguous()

    def run(self, states: torch.Tensor) -> torch.Tensor:
        self._outputs = self._extend(self._values, states)
        return states

    def run_with_transitions(
        self, states: torch.Tensor, transitions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        v_dim, k_dim = states.shape[2:]
        wide = torch.cat([states, transitions], 2)
        zeros = self._values.new_zeros(*self._values.shape[:-1], k_dim)
        self._outputs = self._extend(torch.cat([self._values, zeros], -1), wide)[..., :v_dim]
        return wide[:, :, :v_dim], wide[:, :, v_dim:]

    def identity(self, states: torch.Tensor) -> torch.Tensor:
        return _unit(states.shape[-1], states.dtype, states.device).expand(*states.shape[:2], -1, -1)


@functools.cache
def _unit(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Made once: on a GPU it takes several launches, in each layer otherwise."""
    return torch.eye(size, dtype=dtype, device=device)

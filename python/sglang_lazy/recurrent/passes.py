"""The forward pass of a recurrent layer over the pieces of a batch."""

from collections.abc import Callable
from typing import Protocol

import torch

from sglang_lazy.recurrent.pieces import LinkRows, Pieces

LinkStates = Callable[..., None]
"""See `sgl_kernel_lazy.torch_impl.link_states`."""


class Layer(Protocol):
    """A layer's own kernel with a batch's inputs, which it runs as often as it is asked.

    States are [num_pieces, heads, V, K] fp32, transitions [num_pieces, heads, K, K] or [num_pieces, heads].
    The outputs of its last run are those that count.
    """

    def run(self, states: torch.Tensor) -> torch.Tensor:
        """The states after the pieces, from these before them; may overwrite them."""

    def run_with_transitions(
        self, states: torch.Tensor, transitions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, and what these transitions have become."""

    def identity(self, states: torch.Tensor) -> torch.Tensor:
        """Transitions of no tokens."""


def compute(
    layer: Layer,
    pieces: Pieces,
    requests: torch.Tensor,
    h: torch.Tensor,
    p: torch.Tensor,
    link_states: LinkStates,
) -> None:
    """Run a layer over the pieces, and write the states of rows and chunks.

    requests: [slots, heads, V, K], states of requests.  h, p: [slots, ...], what chunks do to states.
    """
    before = requests.new_empty(len(pieces.lens), *requests.shape[1:], dtype=torch.float32)

    def link(rows: LinkRows | None, *of_pieces: torch.Tensor) -> None:
        if rows is not None:
            link_states(before, None, requests, *rows, p, h, *of_pieces)

    link(pieces.early)
    if not pieces.two_calls and pieces.chunks is None:
        after = layer.run(before)
    else:
        states, transitions = before, layer.identity(before)
        if pieces.two_calls:
            states = torch.zeros_like(before)
        if pieces.resumed is not None:
            pieces.resumed.load(states, h)
            pieces.resumed.load(transitions, p)
        after, transitions = layer.run_with_transitions(states, transitions)
        if pieces.chunks is not None:
            pieces.chunks.store(after, h)
            pieces.chunks.store(transitions, p)
        if pieces.two_calls:
            link(pieces.late, transitions, after)
            after = layer.run(before)
    if pieces.last is not None:
        pieces.last.store(after, requests)

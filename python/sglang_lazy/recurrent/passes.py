"""The forward pass of a recurrent layer over the pieces of a batch. Text behind chunks needs none, see `beginnings`."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from sgl_kernel_lazy.states import Effects, StateRows
from sglang_lazy.recurrent.pieces import Pieces

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
        """Transitions of no tokens, to be read only."""


class LayerStates(NamedTuple):
    """Where a layer's states are in a batch.

    requests_inputs, chunks_inputs: [slots, dim, width], the convolution's last inputs.
    requests: [slots, heads, V, K], states.
    chunks: of each slot, what chunks do to states; see `recurrent.pool`.
    """

    pieces: Pieces
    requests_inputs: torch.Tensor
    requests: torch.Tensor
    chunks_inputs: torch.Tensor
    chunks: Effects
    link_states: LinkStates

    def convolve(self, convolution: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        """What `convolution` returns, and write the last inputs of rows and chunks.

        convolution: takes those before the pieces, [num_pieces, dim, width], and replaces them by those after.
        inputs: [num_tokens, dim].
        """
        last = self.pieces.inputs.before(self.requests_inputs, self.chunks_inputs, inputs)
        out = convolution(last)
        if self.pieces.last is not None:
            self.pieces.last.store(last, self.requests_inputs)
        if self.pieces.chunks is not None:
            self.pieces.chunks.store(last, self.chunks_inputs)
        return out

    def compute(self, layer: Layer) -> None:
        """Run a layer over the pieces, and write the states of rows and chunks."""
        pieces, chunks = self.pieces, self.chunks
        before = self.requests.new_empty(len(pieces.lens), *self.requests.shape[1:], dtype=torch.float32)

        def link(rows: StateRows | None, of_pieces: Effects | None = None) -> None:
            if rows is not None:
                self.link_states(before, None, self.requests, rows, chunks, of_pieces)

        link(pieces.early)
        states, transitions = before, layer.identity(before)
        if pieces.two_calls:
            states = torch.zeros_like(before)
        if pieces.resumed is not None:
            pieces.resumed.load(states, chunks.states)
            transitions = transitions.clone()
            pieces.resumed.load(transitions, chunks.transitions)
        after, transitions = layer.run_with_transitions(states, transitions)
        if pieces.chunks is not None:
            pieces.chunks.store(after, chunks.states)
            pieces.chunks.store(transitions, chunks.transitions)
        if pieces.two_calls:
            link(pieces.late, Effects(transitions, after))
            after = layer.run(before)
        if pieces.last is not None:
            pieces.last.store(after, self.requests)

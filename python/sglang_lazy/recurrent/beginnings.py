"""The beginnings of rows: what the state of a request is before new text behind all of its chunks.

In a batch of such rows layers go on from states, as in any other. What chunks do to these is composed for all layers at
once, before the pass.
"""

from collections.abc import Sequence

import torch

from sgl_kernel_lazy.states import Effects, StateRows
from sglang_lazy.recurrent.passes import LinkStates
from sglang_lazy.recurrent.pieces import Pieces
from sglang_lazy.recurrent.pool import StatePool


def begin_rows(
    pieces: Pieces,
    pool: StatePool,
    conv: Sequence[torch.Tensor],
    states: torch.Tensor | None,
    link_states: LinkStates | None,
) -> None:
    """Write what all layers keep of what precedes each row of a batch to its request's slot.

    pieces: those of a batch that `is_text_behind_chunks`.
    conv: per convolution of a layer, [num_layers, slots, dim, width], the last inputs of requests.
    states: [num_layers, slots, heads, V, K], those of requests. None for layers without, and `link_states` with them.
    """
    assert pieces.last is not None
    slots = pieces.last.slots
    for of_requests, of_chunks in zip(conv, pool.conv, strict=True):
        of_requests[:, slots] = pieces.inputs.known(of_requests, of_chunks)
    if states is None or link_states is None or pool.h is None or pool.p is None:
        return
    assert pieces.early is not None
    rows = of_all_layers(pieces.early, slots, len(states), states.shape[1], pool.size + 1)
    requests, h, p = (each.view(-1, *each.shape[2:]) for each in (states, pool.h, pool.p))
    link_states(requests, None, requests, rows, Effects(p, h))


def of_all_layers(
    rows: StateRows, slots: torch.Tensor, num_layers: int, request_slots: int, chunk_slots: int
) -> StateRows:
    """The rows of one layer after those of another, as slots of layers follow each other.

    slots: of each row's request, which its piece gets, too.  request_slots, chunk_slots: how many a layer has.
    """
    layers = torch.arange(num_layers, dtype=torch.int32, device=slots.device)[:, None]
    initial, indptr, parts = rows.initial_slots, rows.part_indptr, rows.parts
    own = ~(slots.int()[(~parts).clamp(min=0)] + layers * request_slots)
    return StateRows(
        torch.where(initial < 0, initial, initial + layers * request_slots).flatten(),
        torch.cat([indptr[:1], (indptr[1:] + layers * len(parts)).flatten()]),
        torch.where(parts < 0, own, parts + layers * chunk_slots).flatten(),
    )

"""States of recurrent layers in rows with chunks, in plain PyTorch."""

import torch

from sgl_kernel_lazy.contract import check_parts
from sgl_kernel_lazy.states import Effects, StateRows, check_linking


def link_states(
    before: torch.Tensor,
    last: torch.Tensor | None,
    initial_states: torch.Tensor,
    rows: StateRows,
    chunks: Effects,
    pieces: Effects | None = None,
) -> None:
    """Write the state of a recurrent layer before each piece of new text, and after each row.

    before: [num_pieces, num_heads, V, K], written: the state before each piece that a row lists.
    last: [bs, num_heads, V, K], written: the state after each row; or None.
    initial_states: [num_states, num_heads, V, K], which the rows' `initial_slots` count.
    chunks: of each slot.  pieces: of each piece. Without them a row has at most one piece, as its last part, and `last`
        is None: the layer itself computes what comes after the piece.
    States are in fp32, fp16 or bf16, with contiguous matrices. The outputs overlap no input, but without `pieces`
    `before` may be `initial_states` if each row's piece is the slot that the row begins with, or one with which none
    does. States are composed in at least fp32, and rounded when written.
    Raises ValueError on a shape, dtype, device or stride mismatch, and on parts that break these rules.
    """
    check_linking(before, last, initial_states, rows, chunks, pieces)
    check_parts(rows, len(initial_states), len(chunks.states), len(before), only_last=pieces is None)
    indptr = rows.part_indptr.tolist()
    for b, slot in enumerate(rows.initial_slots.tolist()):
        state = initial_states[slot].double() if slot >= 0 else torch.zeros_like(before[0], dtype=torch.float64)
        for part in rows.parts[indptr[b] : indptr[b + 1]].tolist():
            if part >= 0:
                state = _after(state, chunks, part)
            else:
                before[~part] = state
                if pieces is not None:
                    state = _after(state, pieces, ~part)
        if last is not None:
            last[b] = state


def _after(state: torch.Tensor, effects: Effects, part: int) -> torch.Tensor:
    """X T + H for each head."""
    transition = effects.transitions[part]
    moved = state @ transition.double() if effects.matrices else state * transition[:, None, None]
    return moved + effects.states[part]

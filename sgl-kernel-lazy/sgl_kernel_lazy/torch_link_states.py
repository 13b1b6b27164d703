"""States of recurrent layers in rows with chunks, in plain PyTorch."""

import torch

from sgl_kernel_lazy.contract import check_parts
from sgl_kernel_lazy.validation import check_state_inputs


def link_states(
    before: torch.Tensor,
    last: torch.Tensor | None,
    initial_states: torch.Tensor,
    initial_slots: torch.Tensor,
    part_indptr: torch.Tensor,
    parts: torch.Tensor,
    chunk_transitions: torch.Tensor,
    chunk_states: torch.Tensor,
    piece_transitions: torch.Tensor | None = None,
    piece_states: torch.Tensor | None = None,
) -> None:
    """Write the state of a recurrent layer before each piece of new text, and after each row.

    A row is a list of parts in the prompt's order: cached chunks, and pieces of text between them. The step of such a
    layer is affine in its state, so a part takes any state X [V, K] to X T + H: H is the state after the part from
    zero, T what its steps make of the identity when all values are zero. In a gated delta rule T is a matrix, the
    product of its tokens' a (I - b k k^T), the first token's leftmost; in Mamba-2 it is one number, the product of
    their decays.

    before: [num_pieces, num_heads, V, K], written: the state before each piece that a row lists.
    last: [bs, num_heads, V, K], written: the state after each row; or None.
    initial_states: [num_states, num_heads, V, K].  initial_slots: [bs] int32 or int64, which of them each row begins
        with; -1 for zero.
    part_indptr: [bs + 1] int32, the parts of row b are parts[part_indptr[b] : part_indptr[b + 1]].
    parts: [>= part_indptr[-1]] int32 or int64, a chunk's slot, or -1 - j for piece j; no piece twice.
    chunk_transitions: [num_slots, num_heads, K, K] with K up to 128, or [num_slots, num_heads] for numbers: T.
    chunk_states: [num_slots, num_heads, V, K], H.
    piece_transitions, piece_states: the same for pieces, first dimension num_pieces. Without them a row has at most
        one piece, as its last part, and `last` is None: the layer itself computes what comes after the piece.
    All of them are in fp32, fp16 or bf16, each in its own dtype, with contiguous matrices (slices of a larger state
    along V are fine). The outputs overlap no input, but without piece_states `before` may be `initial_states` if each
    row's piece is the slot that the row begins with, or one with which none does. States are composed in at least fp32,
    and rounded when written.
    Raises ValueError on a shape, dtype, device or stride mismatch, and on parts that break these rules.
    """
    check_state_inputs(
        before, last, initial_states, initial_slots, part_indptr, parts, chunk_transitions, chunk_states,
        piece_transitions, piece_states,
    )  # fmt: skip
    check_parts(
        initial_slots, part_indptr, parts, len(initial_states), len(chunk_states), len(before), piece_states is None
    )
    indptr = part_indptr.tolist()
    for b, slot in enumerate(initial_slots.tolist()):
        state = initial_states[slot].double() if slot >= 0 else torch.zeros_like(before[0], dtype=torch.float64)
        for part in parts[indptr[b] : indptr[b + 1]].tolist():
            if part >= 0:
                state = _after(state, chunk_transitions[part], chunk_states[part])
            else:
                before[~part] = state
                if piece_transitions is not None and piece_states is not None:
                    state = _after(state, piece_transitions[~part], piece_states[~part])
        if last is not None:
            last[b] = state


def _after(state: torch.Tensor, transition: torch.Tensor, addition: torch.Tensor) -> torch.Tensor:
    """X T + H for each head.  transition: [num_heads, K, K], or [num_heads]."""
    moved = state * transition[:, None, None] if transition.dim() == 1 else state @ transition.double()
    return moved + addition

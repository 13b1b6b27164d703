"""States of recurrent layers in rows with chunks: each transition is read once for a block of a state's rows."""

import torch
import triton
import triton.language as tl

from sgl_kernel_lazy.states import Effects, StateRows, check_linking

BLOCK_V, NUM_WARPS = 16, 4
SLICE = tl.constexpr(32)
"""How many rows of a transition are held in registers at once: a whole one would not fit."""


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of [ROWS, COLUMNS]."""
    return tl.split(tl.permute(tl.reshape(x, ROWS, 2, COLUMNS // 2), 0, 2, 1))


@triton.jit
def _add_product(
    state, transition, begin, out,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out + state T, for the state's columns from `begin` on, [ROWS, COLUMNS], and the rows of T that meet them."""
    if COLUMNS > SLICE:
        left, right = _halves(state, ROWS, COLUMNS)
        out = _add_product(left, transition, begin, out, ROWS, COLUMNS // 2, K, BLOCK_K)
        return _add_product(right, transition, begin + COLUMNS // 2, out, ROWS, COLUMNS // 2, K, BLOCK_K)
    else:
        i, k = begin + tl.arange(0, COLUMNS), tl.arange(0, BLOCK_K)
        t = tl.load(transition + i[:, None] * K + k[None, :], mask=(i < K)[:, None] & (k < K)[None, :], other=0.0)
        return tl.dot(state, t.to(tl.float32), out, input_precision="tf32x3")


@triton.jit
def _after(
    state, transitions, additions, part, head, at, known,
    stride_transition, stride_transition_head, stride_addition, stride_addition_head,
    K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    """state T + H of a part, for the elements `at` of a head's H."""
    part = part.to(tl.int64)
    transition = transitions + part * stride_transition + head * stride_transition_head
    addition = additions + part * stride_addition + head * stride_addition_head
    h = tl.load(addition + at, mask=known, other=0.0).to(tl.float32)
    if MATRIX:
        return _add_product(state, transition, 0, h, BLOCK_V, BLOCK_K, K, BLOCK_K)
    return state * tl.load(transition).to(tl.float32) + h


@triton.jit
def _link_states_kernel(
    before, last, initial_states, initial_slots, part_indptr, parts,
    chunk_transitions, chunk_states, piece_transitions, piece_states,
    stride_before, stride_before_head, stride_last, stride_last_head, stride_initial, stride_initial_head,
    stride_chunk_transition, stride_chunk_transition_head, stride_chunk_state, stride_chunk_state_head,
    stride_piece_transition, stride_piece_transition_head, stride_piece_state, stride_piece_state_head,
    V: tl.constexpr, K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, MATRIX: tl.constexpr,
):  # fmt: skip
    """One program per head, block of BLOCK_V rows of its states, and row of the batch."""
    b, head = tl.program_id(2), tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    at = v[:, None] * K + k[None, :]
    known = (v < V)[:, None] & (k < K)[None, :]
    slot = tl.load(initial_slots + b).to(tl.int64)
    begin = initial_states + slot * stride_initial + head * stride_initial_head
    state = tl.load(begin + at, mask=known & (slot >= 0), other=0.0).to(tl.float32)
    for i in range(tl.load(part_indptr + b), tl.load(part_indptr + b + 1)):
        part = tl.load(parts + i)
        if part >= 0:
            state = _after(
                state, chunk_transitions, chunk_states, part, head, at, known,
                stride_chunk_transition, stride_chunk_transition_head, stride_chunk_state, stride_chunk_state_head,
                K, BLOCK_V, BLOCK_K, MATRIX,
            )  # fmt: skip
        else:
            piece = (-1 - part).to(tl.int64)
            tl.store(before + piece * stride_before + head * stride_before_head + at, state, mask=known)
            if piece_states is not None:
                state = _after(
                    state, piece_transitions, piece_states, piece, head, at, known,
                    stride_piece_transition, stride_piece_transition_head, stride_piece_state, stride_piece_state_head,
                    K, BLOCK_V, BLOCK_K, MATRIX,
                )  # fmt: skip
    if last is not None:
        tl.store(last + b.to(tl.int64) * stride_last + head * stride_last_head + at, state, mask=known)


def link_states(
    before: torch.Tensor,
    last: torch.Tensor | None,
    initial_states: torch.Tensor,
    rows: StateRows,
    chunks: Effects,
    pieces: Effects | None = None,
) -> None:
    """See `sgl_kernel_lazy.torch_impl.link_states`; without device synchronization."""
    check_linking(before, last, initial_states, rows, chunks, pieces)
    if not rows.bs:
        return
    _, num_heads, v, k = before.shape
    of_pieces = (None, None) if pieces is None else (pieces.transitions, pieces.states)
    strided = (before, last, initial_states, chunks.transitions, chunks.states, *of_pieces)
    strides = [stride for each in strided for stride in ((0, 0) if each is None else each.stride()[:2])]
    _link_states_kernel[(num_heads, triton.cdiv(v, BLOCK_V), rows.bs)](
        before, last, initial_states, rows.initial_slots, rows.part_indptr, rows.parts,
        chunks.transitions, chunks.states, *of_pieces, *strides,
        V=v, K=k, BLOCK_V=BLOCK_V, BLOCK_K=max(16, triton.next_power_of_2(k)), MATRIX=chunks.matrices,
        num_warps=NUM_WARPS,
    )  # fmt: skip

"""What composes the states of recurrent layers: rows of parts, and what these do to a state. Checked as they are made.

See `link_states`.
"""

import dataclasses
import functools

import torch

from sgl_kernel_lazy.validation import FLOATS, INTEGERS, check_tensor, shape_of


@dataclasses.dataclass(frozen=True, eq=False)
class StateRows:
    """Rows of parts in the prompt's order: cached chunks, and pieces of text between them.

    initial_slots: [bs] int32 or int64, the state that each row begins with; -1 for zero.
    part_indptr: [bs + 1] int32, the parts of row b are parts[part_indptr[b] : part_indptr[b + 1]].
    parts: [>= part_indptr[-1]] int32 or int64, a chunk's slot, or -1 - j for piece j; no piece twice.
    Raises ValueError on a shape, dtype or device mismatch.
    """

    initial_slots: torch.Tensor
    part_indptr: torch.Tensor
    parts: torch.Tensor

    def __post_init__(self) -> None:
        device = self.initial_slots.device
        check_tensor("initial_slots", self.initial_slots, (None,), INTEGERS, device)
        check_tensor("part_indptr", self.part_indptr, (self.bs + 1,), (torch.int32,), device)
        check_tensor("parts", self.parts, (None,), INTEGERS, device)

    @functools.cached_property
    def bs(self) -> int:
        return self.initial_slots.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Effects:
    """What parts do to a state X [V, K] of each head: X T + H. May be written to in place.

    The step of a recurrent layer is affine in its state. H is the state after the part from zero, T what its steps make
    of the identity when all values are zero. In a gated delta rule T is a matrix, the product of its tokens'
    a (I - b k k^T), the first token's leftmost; in Mamba-2 it is one number, the product of their decays.

    transitions: T, [n, num_heads, K, K] with K up to 128, or [n, num_heads] for numbers.
    states: H, [n, num_heads, V, K].
    Both are in fp32, fp16 or bf16, each in its own dtype, with contiguous matrices; slices of a larger state along V
    are fine.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """

    transitions: torch.Tensor
    states: torch.Tensor

    def __post_init__(self) -> None:
        n, num_heads, _, k = shape = shape_of("states", self.states, 4)
        check_matrices("states", self.states, shape, self.states.device)
        if not self.matrices:
            check_tensor("transitions", self.transitions, (n, num_heads), FLOATS, self.states.device)
            return
        check_matrices("transitions", self.transitions, (n, num_heads, k, k), self.states.device)
        if k > 128:
            raise ValueError(f"transitions: expected matrices of up to 128 columns, got {k}")

    @functools.cached_property
    def matrices(self) -> bool:
        """Whether transitions are matrices."""
        return self.transitions.dim() == 4


def check_matrices(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], device: torch.device) -> None:
    """Check floats of a shape, whose last two dimensions are contiguous."""
    check_tensor(name, tensor, shape, FLOATS, device)
    if tensor.stride(2) != tensor.shape[3] and tensor.shape[2] > 1:
        raise ValueError(f"{name}: expected contiguous matrices, got strides {list(tensor.stride())}")


def check_linking(
    before: torch.Tensor,
    last: torch.Tensor | None,
    initial_states: torch.Tensor,
    rows: StateRows,
    chunks: Effects,
    pieces: Effects | None,
) -> None:
    """Check the arguments of `link_states`, which have been checked alone, for each other. Done for each call."""
    device = rows.parts.device
    num_pieces, *shape = shape_of("before", before, 4)
    check_matrices("before", before, before.shape, device)
    check_matrices("initial_states", initial_states, (None, *shape), device)
    check_tensor("chunks.states", chunks.states, (None, *shape), FLOATS, device)
    if pieces is not None:
        check_tensor("pieces.states", pieces.states, (num_pieces, *shape), FLOATS, device)
        if pieces.matrices != chunks.matrices:
            raise ValueError("pieces.transitions: expected matrices as of chunks, or numbers as these, got the other")
    if last is not None:
        if pieces is None:
            raise ValueError("last: expected None without pieces, got a tensor")
        check_matrices("last", last, (rows.bs, *shape), device)

"""The pool of states: what cached chunks do to the states of recurrent layers.

A chunk takes a layer's state X, [V, K] for each head, to X T + H; see `sgl_kernel_lazy.link_states`. H is the state
after the chunk from zero. A short convolution's state is its last inputs, which are the chunk's own.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from sgl_kernel_lazy.states import Effects

Transition = Literal["matrix", "number"]
"""What T is for each head: a matrix in a gated delta rule, a number in Mamba-2."""


@dataclasses.dataclass(frozen=True)
class StateLayout:
    """The states of a model's recurrent layers, which are all alike.

    conv: shapes of the last inputs of a layer's convolutions, as SGLang keeps them for a request.
    ssm: the shape of a layer's state, [heads, V, K]; None for layers that are convolutions only.
    transition: the kind of T, None without `ssm`.
    """

    num_layers: int
    conv: tuple[tuple[int, ...], ...]
    conv_dtype: torch.dtype
    ssm: tuple[int, int, int] | None = None
    ssm_dtype: torch.dtype = torch.float32
    transition: Transition | None = None

    def __post_init__(self):
        if (self.ssm is None) != (self.transition is None):
            raise ValueError("a layout has both a state and its transition, or neither")

    @property
    def wide(self) -> tuple[int, int, int] | None:
        """[heads, V + K, K]: H, and T below it; None unless T is a matrix."""
        if self.ssm is None or self.transition != "matrix":
            return None
        heads, v_dim, k_dim = self.ssm
        return heads, v_dim + k_dim, k_dim

    @property
    def min_chunk(self) -> int:
        """How many tokens a chunk must have for the last inputs after it to be its own."""
        return max(shape[-1] for shape in self.conv)

    @property
    def slot_bytes(self) -> int:
        """The size of one chunk's slot in all layers, in bytes."""
        convs = sum(torch.Size(shape).numel() for shape in self.conv) * self.conv_dtype.itemsize
        heads = 0 if self.ssm is None else torch.Size(self.wide or self.ssm).numel() * self.ssm_dtype.itemsize
        if self.ssm is not None and self.transition == "number":
            heads += self.ssm[0] * torch.float32.itemsize
        return self.num_layers * (convs + heads)

    @property
    def piece_bytes(self) -> int:
        """What a pass needs for each of its pieces at most, in bytes: the last inputs of all layers or, if layers have
        states, three times what a chunk does to one of them, in fp32. See `recurrent.passes`."""
        if self.ssm is None:
            return self.slot_bytes
        heads, v_dim, k_dim = self.wide or (self.ssm[0], 2 * self.ssm[1], self.ssm[2])
        return 3 * heads * v_dim * k_dim * torch.float32.itemsize


PIECES_SHARE = 8
"""One in so many bytes of the memory for states is for the pieces of a pass."""


USUAL_CHUNK, LEAST, MOST = 2048, 0.1, 0.5
"""The length of chunks for which the memory is divided between KV and states if nobody says how, and the least and the
most that states then get: shorter chunks need more states, and prompts without chunks none."""


def usual_share(layout: StateLayout, token_bytes: int) -> float:
    """The share of states, with what passes need, in the memory for states and KV.  token_bytes: of a token's KV."""
    for_state = layout.slot_bytes * PIECES_SHARE / (PIECES_SHARE - 1)
    return min(MOST, max(LEAST, for_state / (for_state + USUAL_CHUNK * token_bytes)))


class StateMemory(NamedTuple):
    """What fits into the memory for states of chunks.

    num_states: in the pool.  max_pieces: of one pass, beside it.
    """

    num_states: int
    max_pieces: int

    @classmethod
    def within(cls, num_bytes: float, layout: StateLayout) -> "StateMemory":
        for_pieces = num_bytes / PIECES_SHARE
        pieces = max(2, int(for_pieces / layout.piece_bytes))
        return cls(int((num_bytes - for_pieces) / layout.slot_bytes), pieces)


class StatePool:
    """Slots for what chunks do to states. Slot 0 is for padding and is never handed out.

    layout: of the states.  size: how many slots can be handed out.
    conv: per convolution of a layer, [num_layers, size + 1, *shape].
    h: [num_layers, size + 1, *ssm], None for convolutions only.
    p: T: [num_layers, size + 1, heads, K, K], or [num_layers, size + 1, heads] fp32 for numbers; None with `h`.
    wide: [num_layers, size + 1, heads, V + K, K], of which `h` and `p` are views; None unless T is a matrix. A state of
        this shape that begins as [0; I] and whose values are followed by K zeros ends as [H; T].
    """

    def __init__(self, layout: StateLayout, size: int, device: str | torch.device):
        self.layout, self.size = layout, size
        self.h: torch.Tensor | None = None
        self.p: torch.Tensor | None = None
        self.wide: torch.Tensor | None = None

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(layout.num_layers, size + 1, *shape, dtype=dtype, device=device)

        self.conv = [zeros(shape, layout.conv_dtype) for shape in layout.conv]
        if layout.wide is not None and layout.ssm is not None:
            self.wide = zeros(layout.wide, layout.ssm_dtype)
            self.h, self.p = self.wide.split([layout.ssm[1], layout.ssm[2]], dim=-2)
        elif layout.ssm is not None:
            self.h, self.p = zeros(layout.ssm, layout.ssm_dtype), zeros(layout.ssm[:1], torch.float32)
        self.clear()

    @functools.cached_property
    def effects(self) -> list[Effects]:
        """By layer, what chunks do to its states. Only for layers that have any."""
        assert self.p is not None and self.h is not None
        return [Effects(*of_layer) for of_layer in zip(self.p, self.h, strict=True)]

    @property
    def layers(self) -> list[list[torch.Tensor]]:
        """All it holds, by layer: buffers of [size + 1, ...], contiguous."""
        states = [self.h, self.p] if self.wide is None else [self.wide]
        buffers = [*self.conv, *(each for each in states if each is not None)]
        return [[buffer[layer] for buffer in buffers] for layer in range(self.layout.num_layers)]

    @property
    def slot_bytes(self) -> int:
        """See `StateLayout`."""
        return self.layout.slot_bytes

    def available_size(self) -> int:
        """The number of free slots."""
        return len(self._free)

    def alloc(self, count: int) -> list[int] | None:
        """Slots of those that are free; None if these are fewer. All ranks get the same for the same calls."""
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._used.update(slots)
        return slots

    def free(self, slots: Iterable[int]) -> None:
        """Take back slots. Raises KeyError for one that is not in use."""
        for slot in slots:
            self._used.remove(slot)
            self._free.append(slot)

    def clear(self) -> None:
        """Take back all slots."""
        self._free, self._used = list(range(self.size, 0, -1)), set[int]()

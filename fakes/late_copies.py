"""Copies of the host tier that happen as late as a GPU allows, on the streams of `fakes.streams`."""

from collections.abc import Sequence
from typing import Any

import torch

from fakes import streams
from fakes.streams import current_stream
from sglang_lazy.cache.host_memory import Copier, CpuCopier, HostMemory, Piece
from sglang_lazy.cache.transfers import Transfers

POISON = 0x7F  # a NaN in both fp8 formats, and as two or four of these bytes a huge number


class LateCopier:
    """Queues the copies of `copies` on the current stream. Until they are done, their targets are poison."""

    def __init__(self, copies: Copier, memory: HostMemory):
        self._copies, self._memory = copies, memory

    def plan(self, pieces: Sequence[Piece]) -> tuple[Any, torch.Tensor, torch.Tensor]:
        for piece in pieces:
            assert piece.known is None or torch.equal(piece.known, piece.device)
        host, device = (torch.cat([piece[side] for piece in pieces]) for side in range(2))
        return self._copies.plan(pieces), host, device

    def load(self, plan: tuple, layer: int) -> None:
        for rows in self._memory.groups:
            for own_layer, device in zip(rows.layers, rows.device, strict=True):
                if own_layer == layer:
                    device[plan[2]] = POISON
        current_stream().do(lambda: self._copies.load(plan[0], layer))

    def back_up(self, plan: tuple) -> None:
        for rows in self._memory.groups:
            rows.host[:, plan[1]] = POISON
        current_stream().do(lambda: self._copies.back_up(plan[0]))


def late_transfers(memory: HostMemory, states: HostMemory | None = None) -> Transfers:
    state_copies = None if states is None else LateCopier(CpuCopier(states), states)
    return Transfers(memory, LateCopier(CpuCopier(memory), memory), streams, states, state_copies)

"""States of recurrent layers in host memory, beside the KV of the same nodes; see `host.py`."""

from collections.abc import Callable, Iterable, Sequence

import torch

from sglang_lazy.cache.host_memory import HostMemory, Piece
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.states import States


class HostStates:
    """The copies of a tree's states.

    states: those on the device.  memory: for their copies.
    make_room: drops a copy of a node; returns False if it can drop none. Set by the host tier.
    """

    def __init__(self, states: States, memory: HostMemory):
        self.states, self.memory = states, memory
        self.make_room: Callable[[], bool] = lambda: False

    def lacks(self, node: Node) -> bool:
        """Whether the state at the end of `node` is on the device, and `node` has a copy without it."""
        return node.host is not None and node.host.state is None and self.states.has(node)

    def alloc(self) -> torch.Tensor | None:
        """A slot of the host, int64 [1] on the CPU; None if no copies can make room."""
        while not self.memory.slots.num_free:
            if not self.make_room():
                return None
        return self.memory.slots.alloc(1)

    def free(self, node: Node) -> None:
        """Free the copy of a node's state, if it has one."""
        if node.host.state is not None:
            self.memory.slots.free(node.host.state)
            node.host.state = None

    def adopt(self, node: Node, slot: torch.Tensor) -> None:
        """Let the copy of `node` own a slot of the host to which its state has come; frees it if the copy has one."""
        if node.host.state is None:
            node.host.state = slot
        else:
            self.memory.slots.free(slot)

    @staticmethod
    def copied(nodes: Iterable[Node]) -> list[Node]:
        """Those of `nodes` whose copies have states."""
        return [node for node in nodes if node.host.state is not None]

    def come(self, nodes: Sequence[Node], slots: Sequence[int]) -> None:
        """Let `nodes`, which have got slots on the device, own the slots of the device for their states."""
        for node, slot in zip(nodes, slots, strict=True):
            self.states.give(node, slot)

    def pieces(self, nodes: Sequence[Node]) -> list[Piece]:
        """Of `nodes`, with states on both sides."""
        if not nodes:
            return []
        device = torch.tensor([self.states.slot(node) for node in nodes])
        return [Piece(torch.cat([node.host.state for node in nodes]), device.to(self.memory.device), device)]

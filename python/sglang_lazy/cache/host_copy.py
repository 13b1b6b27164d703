"""The copy of a node in host memory, the transfers that make and read copies."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from sglang_lazy.cache.node import Node
from sglang_lazy.cache.transfers import Ticket
from sglang_lazy.cache.tree import RadixTree


class HostCopy:
    """A node's copy.

    slots: of the host, int64 on the CPU.
    state: the host's slot of the state at the node's end, int64 [1]; None if it has none.
    readers: those that read it besides loads; it stays until there are none.
    transfer: that which makes or reads it, None if none does.
    """

    __slots__ = ("readers", "slots", "state", "transfer")

    def __init__(self, slots: torch.Tensor, transfer: "Transfer | None" = None):
        self.slots, self.transfer, self.readers = slots, transfer, 0
        self.state: torch.Tensor | None = None


class Transfer:
    """Copies under way.  nodes: those copied, parents first.  ends: those locked until it has ended, and with them all
    of `nodes`."""

    __slots__ = ("ends", "loads", "nodes", "ticket")

    def __init__(self, nodes: list[Node], ends: list[Node], ticket: Ticket, loads: bool):
        self.nodes, self.ends, self.ticket, self.loads = nodes, ends, ticket, loads


class HostWatcher:
    """Is told what happens on the host; does nothing by itself."""

    def stored(self, node: Node) -> None:
        """`node` has got a copy, which may still be under way."""

    def removed(self, node: Node) -> None:
        """The copy of `node` is freed next."""

    def copied(self, node: Node) -> None:
        """The copy of `node`, made of what the device has, is complete."""

    def loaded(self, node: Node) -> None:
        """`node` has got slots on the device, to which its copy is being loaded."""

    def gave_up(self, num_tokens: int) -> None:
        """So many tokens' copies were given up while the device had them."""


@contextlib.contextmanager
def above_kept(tree: RadixTree, nodes: Sequence[Node]) -> Iterator[None]:
    """A context in which what stands before `nodes` on the device is not evicted."""
    above = dict.fromkeys(node.parent for node in nodes if node.parent.slots is not None)
    for node in above:
        tree.lock(node)
    yield
    for node in above:
        tree.unlock(node)

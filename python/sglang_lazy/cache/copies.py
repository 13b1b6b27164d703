"""Choose chunks on the device whose copies a full host can give up.

A copy of a chunk on the device is useful only after the chunk has left the device. So when the host is full, it first
gives up copies of the chunks that came to the device last, and only then chunks that only it has: device and host then
hold different chunks. A chunk without a copy is copied again when it is among the next to leave.
"""

from collections.abc import Callable

from sglang_lazy.cache.node import Node
from sglang_lazy.core.keys import of_chunks

NEXT_SHARE = 10
"""The chunks in 1/NEXT_SHARE of the device's slots count as next to leave."""
MAX_LOOKS = 64
"""The number of copies that cannot be given up after which a search ends."""


class Copies:
    """Bookkeeping beside a tree, of nodes with `HostKV`'s copies.

    next_leaves: returns the evictable leaves with the next given number of tokens to be evicted, in that order.
    size: the number of slots on the device.
    """

    def __init__(self, next_leaves: Callable[[int], list[Node]], size: int):
        self._next_leaves, self._num_next = next_leaves, max(1, size // NEXT_SHARE)
        self._redundant: dict[int, Node] = {}  # by node id, in the order in which they came
        self._without: set[int] = set()  # ids of nodes whose copy was given up
        self._next: set[int] = set()
        self._again: list[Node] = []  # of those, the ones without a copy
        self._num_evicted = self._num_next

    def came(self, node: Node) -> None:
        """`node` is on the device, and its copy is complete."""
        if of_chunks(node.namespace):
            self._redundant.pop(node.id, None)
            self._redundant[node.id] = node

    def left(self, node: Node, num_tokens: int) -> None:
        """`node` has left the device."""
        self.gone(node)
        self._num_evicted += num_tokens

    def gone(self, node: Node) -> None:
        """`node` has left the tree, or its copy is read or made."""
        self._redundant.pop(node.id, None)
        self._without.discard(node.id)

    def split(self, above: Node, node: Node) -> None:
        """`above` holds what was the beginning of `node`."""
        if node.id in self._without:
            self._without.add(above.id)
        if node.id in self._redundant:
            del self._redundant[node.id]
            self._redundant |= {above.id: above, node.id: node}

    def wanted(self, node: Node) -> bool:
        """Whether `node`, if it has no copy, should get one now."""
        return node.id not in self._without

    def copied(self, node: Node) -> None:
        """`node` gets a copy."""
        self._without.discard(node.id)

    def give_up(self, num_tokens: int) -> list[Node]:
        """Nodes whose copies should be freed now, with up to `num_tokens` tokens."""
        self._look()
        given_up: dict[int, Node] = {}
        looks = 0
        for node in reversed(self._redundant.values()):  # children come after their parents
            if num_tokens <= 0 or looks == MAX_LOOKS:
                break
            copied = any(child.host and child.id not in given_up for child in node.children.values())
            if node.id in self._next or node.host.readers or copied:
                looks += 1
                continue
            num_tokens -= len(node)
            given_up[node.id] = node
        for node_id in given_up:
            del self._redundant[node_id]
        self._without.update(given_up)
        return list(given_up.values())

    def to_copy(self) -> list[Node]:
        """Nodes that have no copy and are about to leave the device."""
        if self._without:
            self._look()
        again, self._again = [leaf for leaf in self._again if leaf.id in self._without], []
        self._without.difference_update(leaf.id for leaf in again)
        return again

    def _look(self) -> None:
        """Determine the next leaves to leave, unless few have left since the last time."""
        if self._num_evicted < max(1, self._num_next // 4):
            return
        self._num_evicted = 0
        leaves = self._next_leaves(self._num_next)
        self._next = {leaf.id for leaf in leaves}
        self._again += [leaf for leaf in leaves if leaf.id in self._without]

"""The nodes of the tree, and the orders in which they are evicted."""

import itertools
from array import array
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

_ids = itertools.count()


class Node:
    """Tokens that follow those of its ancestors, and where their KV is.

    A node without slots is only on the host (`host`). One that is in neither place has left the tree.

    id: not used again in this process.
    tokens: at least one, int64; an array that nobody changes.
    namespace: hashable; the same text in another namespace has other KV.
    slots: of the device, int64 [number of tokens]; None if the device does not hold them.
    num_below: how many of its children have slots.
    locks: how many hold it, or a node below it.
    last_use: a tick of the tree's clock.  hits: how many requests have used it.  priority: the highest of theirs.
    window: its window KV, None if it has lost it; see `windows.py`.
    host: its copy in host memory, None if there is none; see `host.py`.
    state: that of recurrent layers at its end, None if it has none and nobody holds it; see `states.py`.
    """

    __slots__ = (
        "children",
        "hits",
        "host",
        "id",
        "last_use",
        "locks",
        "namespace",
        "num_below",
        "parent",
        "priority",
        "slots",
        "state",
        "tokens",
        "window",
    )

    def __init__(self, parent: "Node | None", tokens: array, namespace: Hashable, slots: torch.Tensor | None):
        self.id = next(_ids)
        self.parent: Node = self if parent is None else parent
        self.tokens, self.namespace, self.slots = tokens, namespace, slots
        self.children: dict[Hashable, Node] = {}
        self.num_below = self.locks = self.last_use = self.hits = self.priority = 0
        self.window: Any = None
        self.host: Any = None
        self.state: Any = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __bool__(self) -> bool:
        return True

    @property
    def is_root(self) -> bool:
        return self.parent is self

    def path(self) -> "list[Node]":
        """The nodes from below the root to this one."""
        path: list[Node] = []
        node = self
        while not node.is_root:
            path.append(node)
            node = node.parent
        return path[::-1]

    def key_of(self, namespace: Hashable, token: int) -> Hashable:
        """The key of the child that begins with `token`: namespaces part at the root."""
        return (namespace, token) if self.is_root else token


Order = Callable[[Node], Any]
"""Returns what nodes are compared by: the smallest is evicted first."""

_PROTECTED_HITS = 2
"""Nodes with so many hits are in the protected segment of `slru`."""

ORDERS: Mapping[str, Order] = {
    "lru": lambda node: node.last_use,
    "lfu": lambda node: (node.hits, node.last_use),
    "fifo": lambda node: node.id,
    "filo": lambda node: -node.id,
    "priority": lambda node: (node.priority, node.last_use),
    "slru": lambda node: (node.hits >= _PROTECTED_HITS, node.last_use),
}
"""By the names of SGLang's `--radix-eviction-policy`. Use must not bring a node's eviction closer (`mru` does)."""

"""The nodes of the tree: their places, and what of them can be evicted."""

import itertools
from array import array
from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol

import numpy as np
import torch

from sglang_lazy.cache.eviction import Evictable
from sglang_lazy.cache.node import Node, Order
from sglang_lazy.cache.parts import Part, Watcher


class Allocator(Protocol):
    """The device's slots, as SGLang's allocators hand them out."""

    device: torch.device

    @property
    def size(self) -> int: ...

    def available_size(self) -> int: ...

    def free(self, slots: torch.Tensor) -> None: ...


class Structure:
    """The inside of a `RadixTree`, as the parts of its nodes see and change it.

    Recency is a tick of a counter, and ties are broken by node id, so all tensor-parallel ranks evict alike.

    order: of eviction, one of `ORDERS`.
    clock: yields growing numbers; trees whose ages are compared share one.
    parts, watcher: the components, and who is told what leaves; set once at start.
    num_evictable: tokens on the device.
    """

    def __init__(
        self,
        allocator: Allocator,
        order: Order,
        clock: Iterator[int] | None = None,
    ):
        self.allocator, self.watcher = allocator, Watcher()
        self.parts: tuple[Part, ...] = ()
        self._order, self._clock = order, clock or itertools.count(1)
        self._no_slots = torch.empty(0, dtype=torch.int64, device=allocator.device)
        self._start_anew()

    def _start_anew(self) -> None:
        self.root: Node = Node(None, array("q"), None, self._no_slots)
        self.num_evictable = 0
        self._leaves = Evictable(self._order)  # on the device

    # Growing

    def grow(self, tokens: array, namespace: Hashable) -> tuple[Node, int, Node | None]:
        """The node where what is cached of `tokens` ends, split off if need be; for how many tokens; and a new leaf
        below it with the others, in no tier yet, None if there are no others."""
        node, count = self._descend(tokens, namespace)
        return node, count, self._new_leaf(node, tokens[count:], namespace) if count < len(tokens) else None

    def came(self, nodes: Iterable[Node]) -> None:
        """Nodes have got slots on the device, parents first."""
        for node in nodes:
            self.num_evictable += len(node)
            node.parent.num_below += 1
            self._leaves.discard(node.parent)
            self._offer(node)

    def split(self, node: Node, count: int) -> Node:
        """Split off the first `count` tokens of `node`, fewer than it has; returns the node that has them."""
        above = Node(node.parent, node.tokens[:count], node.namespace, None)
        key = node.parent.key_of(node.namespace, node.tokens[0])
        above.locks, above.last_use, above.hits, above.priority = node.locks, node.last_use, node.hits, node.priority
        node.parent.children[key] = above
        above.children[node.tokens[count]] = node
        if node.slots is not None:
            above.slots, node.slots = node.slots[:count].clone(), node.slots[count:].clone()
            above.num_below = 1
        node.parent, node.tokens = above, node.tokens[count:]
        for part in self.parts:
            part.split(above, node)
        return above

    def _new_leaf(self, parent: Node, tokens: array, namespace: Hashable) -> Node:
        leaf = Node(parent, tokens, namespace, None)
        leaf.last_use = next(self._clock)
        parent.children[parent.key_of(namespace, tokens[0])] = leaf
        return leaf

    def _descend(self, tokens: array, namespace: Hashable) -> tuple[Node, int]:
        """The node where what is cached of `tokens` ends, in any tier, and for how many tokens; splits a node there."""
        node, start = self.root, 0
        while start < len(tokens):
            child = node.children.get(node.key_of(namespace, tokens[start]))
            if child is None:
                break
            count = _num_equal(child.tokens, tokens[start : start + len(child)])
            node = child if count == len(child) else self.split(child, count)
            start += count
        return node, start

    # Leaving

    def _offer(self, node: Node) -> None:
        """Make a node evictable if nothing holds it and nothing on the device follows it."""
        if node.slots is not None and not (node.locks or node.num_below or node.is_root):
            self._leaves.add(node)

    def evict_leaf(self, leaf: Node) -> None:
        """Evict one evictable leaf from the device and free its slots."""
        self.watcher.evicted(leaf)
        self.allocator.free(self._leave(leaf))

    def is_evictable(self, node: Node) -> bool:
        """Whether `node` could be evicted next."""
        return node in self._leaves

    def next_leaves(self, num_tokens: int) -> list[Node]:
        """The evictable leaves with the next `num_tokens` to leave the device, in that order."""
        leaves: list[Node] = []
        while num_tokens > 0 and (leaf := self._leaves.pop()) is not None:
            leaves.append(leaf)
            num_tokens -= len(leaf)
        for leaf in leaves:
            self._leaves.add(leaf)
        return leaves

    def _leave(self, leaf: Node) -> torch.Tensor:
        """Take a leaf off the device; returns its slots."""
        self._leaves.discard(leaf)
        stays = [part.left_device(leaf) for part in self.parts]  # all of them are told
        slots, leaf.slots = leaf.slots, None
        assert slots is not None
        self.num_evictable -= len(leaf)
        leaf.parent.num_below -= 1
        self._offer(leaf.parent)
        if not any(stays):
            self.drop(leaf)
        return slots

    def drop(self, leaf: Node) -> None:
        """Take a leaf that has no slots out of the tree."""
        for part in self.parts:
            part.left_tree(leaf)
        del leaf.parent.children[leaf.parent.key_of(leaf.namespace, leaf.tokens[0])]
        self.watcher.gone(leaf)


def _num_equal(known: array, tokens: array) -> int:
    """How many first tokens two arrays share."""
    count = min(len(known), len(tokens))
    known, tokens = known[:count], tokens[:count]
    if known == tokens:
        return count
    return int(np.argmax(np.frombuffer(known, dtype=known.typecode) != np.frombuffer(tokens, dtype=tokens.typecode)))

"""Nodes that can be evicted: the least valuable is found without sorting all of them at every eviction."""

import heapq
from typing import Any

from sglang_lazy.cache.node import Node, Order

SLACK = 1000
"""Stale entries that are not worth a pass over the heap."""


class Evictable:
    """Nodes by eviction priority, which may grow while they are here.

    Equal priorities are popped in order of node id, which is the same on every tensor-parallel rank.

    nodes: all of them. Those that leave stay in the heap until they are on top of it, or are the most there.
    """

    def __init__(self, priority: Order):
        self.nodes: set[Node] = set()
        self._priority = priority
        self._heap: list[tuple[Any, int, Node]] = []
        self._entered: set[int] = set()  # ids in the heap

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, node: Node) -> bool:
        return node in self.nodes

    def add(self, node: Node) -> None:
        """Add a node, unless it is here. Drops stale entries if they are the most: they hold keys and slots."""
        self.nodes.add(node)
        if node.id not in self._entered:
            self._entered.add(node.id)
            heapq.heappush(self._heap, (self._priority(node), node.id, node))
            if len(self._heap) > 2 * len(self.nodes) + SLACK:
                self._heap = [entry for entry in self._heap if entry[2] in self.nodes]
                heapq.heapify(self._heap)
                self._entered = {node_id for _, node_id, _ in self._heap}

    def discard(self, node: Node) -> None:
        """Take a node away, if it is here."""
        self.nodes.discard(node)

    def pop(self) -> Node | None:
        """Take away the least valuable node and return it; None if there is none.

        One that has become more valuable since it entered the heap goes back there with its present priority.
        """
        while self._heap:
            entered_priority, node_id, node = self._heap[0]
            if node in self.nodes and (priority := self._priority(node)) > entered_priority:
                heapq.heapreplace(self._heap, (priority, node_id, node))
                continue
            heapq.heappop(self._heap)
            self._entered.discard(node_id)
            if node in self.nodes:
                self.nodes.discard(node)
                return node
        return None

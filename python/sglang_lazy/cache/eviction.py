"""A lazy eviction heap, which finds the least valuable leaf without sorting all leaves at every eviction."""

import heapq
from collections.abc import Collection
from typing import Any

from sglang_lazy.cache.node import Node, Order

SLACK = 1000
"""Stale leaves that are not worth a pass over the heap."""


class EvictionHeap:
    """Leaves by eviction priority; a leaf's priority may grow after it was pushed.

    `pop` compares the stored priority with the current one and pushes the leaf back if it has become more valuable.
    Equal priorities are popped in order of node id, which is the same on every tensor-parallel rank.
    """

    def __init__(self, priority: Order):
        self._priority = priority
        self._heap: list[tuple[Any, int, Node]] = []
        self._members: set[int] = set()

    def push(self, node: Node, evictable: Collection[Node]) -> None:
        """Add a leaf unless it is in the heap. Drops stale leaves if they are the most: they hold keys and slots."""
        if node.id not in self._members:
            self._members.add(node.id)
            heapq.heappush(self._heap, (self._priority(node), node.id, node))
            if len(self._heap) > 2 * len(evictable) + SLACK:
                self._heap = [entry for entry in self._heap if entry[2] in evictable]
                heapq.heapify(self._heap)
                self._members = {node_id for _, node_id, _ in self._heap}

    def pop(self, evictable: Collection[Node]) -> Node | None:
        """Remove and return the least valuable leaf in `evictable`, or None. Drops stale leaves on the way."""
        while self._heap:
            pushed_priority, node_id, node = self._heap[0]
            if node in evictable:
                priority = self._priority(node)
                if priority > pushed_priority:
                    heapq.heapreplace(self._heap, (priority, node_id, node))
                    continue
                heapq.heappop(self._heap)
                self._members.discard(node_id)
                return node
            heapq.heappop(self._heap)
            self._members.discard(node_id)
        return None

"""Lazy eviction heap: the least valuable evictable leaf, without sorting all leaves at every eviction."""

import heapq
from collections.abc import Callable, Collection
from typing import Any


class EvictionHeap:
    """Leaves by eviction priority, where a priority may have grown since its leaf was pushed.

    SGLang recomputes a leaf's priority at eviction; so one kept here may be stale. `pop` compares it with the current
    priority and pushes a leaf back if it has become more valuable. Equal priorities leave in order of node id,
    which every tensor-parallel rank shares.
    """

    def __init__(self, priority: Callable[[Any], Any]):
        self._priority = priority
        self._heap: list[tuple[Any, int, Any]] = []
        self._members: set[int] = set()

    def push(self, node: Any) -> None:
        """Add a leaf, unless it is in the heap already."""
        if node.id not in self._members:
            self._members.add(node.id)
            heapq.heappush(self._heap, (self._priority(node), node.id, node))

    def pop(self, evictable: Collection[Any]) -> Any | None:
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

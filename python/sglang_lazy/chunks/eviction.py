"""Lazy eviction heap: the least valuable evictable leaf, without sorting all leaves at every eviction."""

import heapq
from collections.abc import Callable, Collection
from typing import Any


class EvictionHeap:
    """Leaves by eviction priority, where a priority may have grown since its leaf was pushed.

    SGLang recomputes a leaf's priority at eviction; an entry here may therefore be stale. `pop` compares it with the
    current priority and pushes a leaf that has become more valuable back. Equal priorities leave in order of node id,
    which every tensor-parallel rank shares.
    """

    def __init__(self, priority: Callable[[Any], Any]):
        self._priority = priority
        self._heap: list[tuple[Any, int, Any]] = []
        self._members: set[int] = set()

    def push(self, node: Any) -> None:
        """Add a leaf; one that is already in keeps its entry."""
        if node.id not in self._members:
            self._members.add(node.id)
            heapq.heappush(self._heap, (self._priority(node), node.id, node))

    def pop(self, evictable: Collection[Any]) -> Any | None:
        """Remove and return the least valuable leaf in `evictable`, or None; other entries met are dropped."""
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

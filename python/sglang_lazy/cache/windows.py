"""Window KV: that of layers with sliding windows, whose pool has fewer slots than that of the others.

A cached token has KV in all other layers. Its window KV, a slot of the smaller pool, may be evicted earlier. A prefix
or chunk can be read if its last tokens, as many as a window holds, still have theirs.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from sglang_lazy.cache.device import WindowMemory
from sglang_lazy.cache.eviction import Evictable
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.parts import Part
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.core.keys import of_chunks


class WindowPool(Protocol):
    """The smaller pool. Each slot of the other layers may have a window slot; slots below are those of the others.

    window: how many tokens before its own a query sees.
    """

    window: int

    @property
    def size(self) -> int:
        """In tokens."""

    def available_size(self) -> int: ...

    def share(self, slots: torch.Tensor, lenders: torch.Tensor) -> None:
        """Give `slots` the window slots of `lenders`, which keep them as well."""

    def take_back(self, lenders: torch.Tensor) -> None:
        """`lenders` have no window slots from now on, which others share with them."""

    def free(self, slots: torch.Tensor) -> None:
        """Free the window slots of `slots`."""


class WindowKV:
    """The window KV of all tokens of a node.

    last_use: as counted by the tree; 0 for a chunk that has not been used since it was computed.
    """

    __slots__ = ("last_use", "locks")

    def __init__(self, last_use: int, locks: int = 0):
        self.last_use, self.locks = last_use, locks


class Windows(Part):
    """The window KV of a tree's nodes; when its pool runs short, the least recently used goes first.

    A lock on a node also locks the window KV of a number of tokens up to the end of that node. If the first of them is
    inside a node, that node is split, so that the same tokens can be unlocked later.

    pool: where it is.  num_evictable, num_locked: tokens with window KV.
    """

    def __init__(self, tree: RadixTree, pool: WindowPool):
        self._tree, self.pool = tree, pool
        self.reset()

    def reset(self) -> None:
        self._unlocked = Evictable(lambda node: node.window.last_use)
        self.num_evictable = self.num_locked = 0

    def memory(self, also_evictable: int) -> WindowMemory:
        """The pool.  also_evictable: tokens in it that others can evict."""
        free = self.pool.available_size() + self.num_evictable + also_evictable
        return WindowMemory(self.pool.size, free, self.pool.window)

    # Reading

    def readable(self, node: Node, spread: int | None) -> Node:
        end, needed = node, None if spread is None else self.pool.window + spread
        count = 0
        while not node.is_root and (needed is None or count < needed):
            if node.window is None:
                end, count = node.parent, 0
            else:
                count += len(node)
            node = node.parent
        return end

    def used(self, node: Node, spread: int) -> None:
        if node.is_root:
            return
        # Text is matched again without its last token, which is computed in any case.
        count, now = self.pool.window + spread + (not of_chunks(node.namespace)), node.last_use
        while count > 0 and not node.is_root:
            if node.window is not None:
                node.window.last_use = now
            count -= len(node)
            node = node.parent

    # Locks

    def lock(self, node: Node, spread: int) -> None:
        for held in self._last(node, spread):
            if not held.window.locks:
                self._unlocked.discard(held)
                self._count(-len(held))
            held.window.locks += 1

    def unlock(self, node: Node, spread: int) -> None:
        for held in self._last(node, spread):
            held.window.locks -= 1
            if not held.window.locks:
                self._count(len(held))
                self._unlocked.add(held)

    def num_unlocked(self, node: Node, spread: int = 0) -> int:
        """How many free or evictable tokens of window KV it would take to lock `node`."""
        count, num_unlocked = self.pool.window + spread, 0
        while count > 0 and not node.is_root:
            num_unlocked += 0 if node.window.locks else min(count, len(node))
            count -= len(node)
            node = node.parent
        return num_unlocked

    def _last(self, node: Node, spread: int) -> Iterator[Node]:
        """The nodes of the last tokens up to the end of `node`, last node first, splitting one if needed."""
        count = self.pool.window + spread
        while count > 0 and not node.is_root:
            if count < len(node):
                self._tree.split(node, len(node) - count)
            count -= len(node)
            yield node
            node = node.parent

    def split(self, above: Node, node: Node) -> None:
        if (window := node.window) is not None:
            above.window = WindowKV(window.last_use, window.locks)
            if not window.locks:
                self._unlocked.add(above)

    def _count(self, change: int) -> None:
        self.num_evictable += change
        self.num_locked -= change

    # Adding

    def added(self, end: Node, slots: torch.Tensor, num_present: int, start: int) -> torch.Tensor:
        """Give nodes without window KV that of `slots`, which have it from `start` on."""
        node, count, lent = end, len(slots), [slots[:0]]
        while count > start:
            if node.window is None:
                if count - len(node) < start:
                    self._tree.split(node, start - count + len(node))
                own = slots[count - len(node) : count]
                if count <= num_present:
                    self.pool.share(node.slots, own)
                    lent.append(own)
                node.window = WindowKV(0 if of_chunks(node.namespace) else node.last_use)
                self.num_evictable += len(node)
                self._unlocked.add(node)
            count -= len(node)
            node = node.parent
        return torch.cat(lent)

    def take(self, lent: torch.Tensor) -> None:
        """The tree alone has the window KV of slots lent to it, see `RadixTree.add`, from now on."""
        self.pool.take_back(lent)

    # Leaving

    def evict(self, num_tokens: int) -> None:
        """Free so many tokens of window KV, or fewer if there are no more."""
        wanted = self.pool.available_size() + num_tokens
        while self.pool.available_size() < wanted:
            if (node := self._unlocked.pop()) is not None:
                self._evict(node)
            elif not self._tree.release_lock():
                break

    def _evict(self, node: Node) -> None:
        """A leaf cannot be read without its window KV, so it leaves the device unless it is held."""
        if self._tree.is_evictable(node):
            self._tree.evict_leaf(node)
            return
        self._drop(node)
        self.pool.free(node.slots)
        behind = [(node, 0)]
        while behind:  # chunks that end less than a window later cannot be read any more
            end, distance = behind.pop()
            self._tree.watcher.gone(end)
            nearer = ((child, distance + len(child)) for child in end.children.values())
            behind += [(child, far) for child, far in nearer if far < self.pool.window]

    def left_device(self, node: Node) -> bool:
        """The allocator frees window slots with the slots that have them."""
        if node.window is not None:
            self._drop(node)
        return False

    def _drop(self, node: Node) -> None:
        node.window = None
        self._unlocked.discard(node)
        self.num_evictable -= len(node)

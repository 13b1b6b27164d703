"""States of recurrent layers, which nodes hold beside their KV: a chunk can be read only with what it does to a state.

A node has the state at its end. A prefix of it has none, so the node where a prefix ends must have its own.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from sglang_lazy.cache.eviction import Evictable
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.parts import Part
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.core.keys import of_chunks

TEXT_SHARE = 4
"""States of text that no request reads take at most one in so many slots: most answers are never continued, and would
push out chunks that many prompts share. So do those of text before chunks that running requests have computed."""


class StateSlots(Protocol):
    """The pool of states.  slot_bytes: the size of a state.  layers: the buffers of each layer, each [slots, ...]."""

    @property
    def size(self) -> int: ...

    @property
    def layers(self) -> Sequence[Sequence[torch.Tensor]]: ...

    @property
    def slot_bytes(self) -> int: ...

    def available_size(self) -> int: ...

    def alloc(self, count: int) -> list[int] | None: ...

    def free(self, slots: Iterable[int]) -> None: ...

    def clear(self) -> None: ...


class State:
    """The state at the end of a node.

    slot: None if it has none, and is only locked.
    locks: how many read up to the end of this node, not further.  last_use: as counted by the tree.
    """

    __slots__ = ("last_use", "locks", "slot")

    def __init__(self, last_use: int):
        self.slot: int | None = None
        self.locks, self.last_use = 0, last_use


class States(Part):
    """The states of a tree's nodes; when the pool runs short, the least recently used goes first.

    pool: where they are.  num_evictable, num_locked: how many.
    """

    def __init__(self, tree: RadixTree, pool: StateSlots):
        self._tree, self.pool = tree, pool
        self.reset()

    def reset(self) -> None:
        self.pool.clear()
        self._unlocked = Evictable(lambda node: node.state.last_use)
        self._texts: set[Node] = set()  # nodes with a state, locked or not, that are no chunks
        self.num_locked = 0

    @property
    def num_evictable(self) -> int:
        return len(self._unlocked)

    @property
    def num_texts(self) -> int:
        """How many of the evictable ones are no chunks'."""
        return len(self._texts & self._unlocked.nodes)

    @property
    def num_bytes(self) -> dict[str, int]:
        """How much of the pool is read by requests, can be evicted, and is free."""
        free = self.pool.available_size()
        slots = {"locked": self.num_locked, "evictable": self.num_evictable, "free": free}
        return {name: count * self.pool.slot_bytes for name, count in slots.items()}

    # Reading

    def slot(self, node: Node) -> int:
        """The slot of a node that has a state."""
        return node.state.slot

    def has(self, node: Node) -> bool:
        return node.state is not None and node.state.slot is not None

    def readable(self, node: Node, spread: int | None) -> Node:
        while not (node.is_root or (self.has(node) if node.slots is not None else _on_host(node))):
            node = node.parent
        return node

    def used(self, node: Node, spread: int) -> None:
        if node.state is not None:
            node.state.last_use = node.last_use

    # Locks

    def lock(self, node: Node, spread: int) -> None:
        if node.is_root:
            return
        if node.state is None:
            node.state = State(node.last_use)
        node.state.locks += 1
        if node in self._unlocked:
            self._unlocked.discard(node)
            self.num_locked += 1

    def unlock(self, node: Node, spread: int) -> None:
        if node.is_root:
            return
        node.state.locks -= 1
        if node.state.locks:
            return
        if node.state.slot is None:
            node.state = None
        else:
            self.num_locked -= 1
            self._unlocked.add(node)

    def num_unlocked(self, nodes: Iterable[Node]) -> int:
        """How many free or evictable states it would take to lock `nodes` and load those on the host."""
        return len({node for node in nodes if node.slots is None or node in self._unlocked})

    # Adding

    def give(self, node: Node, slot: int) -> bool:
        """Let `node` own the slot of the state at its end. False if it has one already: the caller keeps the slot."""
        if self.has(node):
            return False
        if node.state is None:
            node.state = State(node.last_use)
        node.state.slot = slot
        if not of_chunks(node.namespace):
            self._texts.add(node)
        if node.state.locks:
            self.num_locked += 1
        else:
            self._unlocked.add(node)
        return True

    # Leaving

    def allocate(self, count: int) -> list[int]:
        """Slots, evicting as needed. Raises RuntimeError if there are no more."""
        while self.pool.available_size() < count:
            if (node := self._unlocked.pop()) is not None:
                self._evict(node)
            elif not self._tree.release_lock():
                break
        slots = self.pool.alloc(count)
        if slots is None:
            raise RuntimeError(f"out of states: {count} wanted, {self.pool.available_size()} free")
        return slots

    def for_loading(self, count: int) -> list[int] | None:
        """Slots, evicting only what is lacking; None, and nothing evicted, if that would not suffice."""
        if self.pool.available_size() + self.num_evictable < count:
            return None
        while self.pool.available_size() < count:
            node = self._unlocked.pop()
            assert node is not None
            self._evict(node)
        return self.pool.alloc(count)

    def for_text(self, read: bool = False) -> int | None:
        """A slot that is free, or whose state no request reads, for text; None if there is none.

        read: whether its state will be read from the start.
        """
        most, unread = max(1, self.pool.size // TEXT_SHARE), self._texts & self._unlocked.nodes
        if read and len(self._texts) - len(unread) >= most:
            return None
        if len(unread) >= most:
            self._evict(min(unread, key=lambda node: (node.state.last_use, node.id)))
        elif not self.pool.available_size() and (node := self._unlocked.pop()) is not None:
            self._evict(node)
        slots = self.pool.alloc(1)
        return None if slots is None else slots[0]

    def _evict(self, node: Node) -> None:
        """A leaf cannot be read without its state, so it leaves the device unless it is held."""
        if self._tree.is_evictable(node):
            self._tree.evict_leaf(node)
        else:
            self._drop(node)
            self._tree.watcher.gone(node)

    def left_device(self, node: Node) -> bool:
        if self.has(node):
            self._drop(node)
        return False

    def _drop(self, node: Node) -> None:
        """Take the state, which is not locked, from its node."""
        self.pool.free([node.state.slot])
        node.state = None
        self._unlocked.discard(node)
        self._texts.discard(node)


def _on_host(node: Node) -> bool:
    """Whether the host has a copy of the state at the end of `node`."""
    return node.host is not None and node.host.state is not None

"""The radix tree that owns the KV of chunks and of linked requests' text.

It knows of no model and of no tier: beside slots on the device, nodes may hold *parts*, such as window KV or a copy on
the host, each kept by a component with rules of its own.
"""

from array import array
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import torch

from sglang_lazy.cache.node import Node, Order
from sglang_lazy.cache.structure import Allocator, Structure


class Added(NamedTuple):
    """The result of `RadixTree.add`.

    num_present: how many of the tokens the device had already, in the tree's own slots.  node: where the tokens end.
    lent: int64, the caller's slots whose window KV the tree has taken for its own slots.
    """

    num_present: int
    node: Node
    lent: torch.Tensor


class RadixTree(Structure):
    """A radix tree over token ids, with namespaces.

    When a node is split it keeps its end: the new node is its parent. The ancestors of a node with slots have slots.

    order, clock: see `Structure`.
    release_lock: has a waiting request give up its locks when nothing is evictable; returns False if none holds any.
    num_evictable, num_locked: tokens on the device.  num_locks: locks held, counted where they were taken.
    """

    def __init__(self, allocator: Allocator, order: Order, clock: Iterator[int] | None = None):
        super().__init__(allocator, order, clock)
        self.release_lock: Callable[[], bool] = lambda: False
        self.num_locked = self.num_locks = 0

    def reset(self) -> None:
        """Forget all nodes, whose slots the caller frees. Holders of nodes find them without slots and copies."""
        left: list[Node] = [self.root]
        while left:
            node = left.pop()
            left += node.children.values()
            node.children.clear()  # cyclic references would leave the nodes to the garbage collector
            node.slots = node.host = node.window = node.state = None
        self._start_anew()
        self.num_locked = self.num_locks = 0
        for part in self.parts:
            part.reset()

    # Reading

    def find(self, tokens: array, namespace: Hashable, complete: bool = False) -> tuple[torch.Tensor, Node]:
        """The longest readable prefix on the device: its slots (int64) and the node where it ends.

        complete: whether all of what the parts hold is needed, not only what reading its end takes.
        """
        node, _ = self._descend(tokens, namespace)
        while node.slots is None:
            node = node.parent
        spread = None if complete else 0
        while (earlier := self._readable(node, spread)) is not node:
            node = earlier
        self.use(node)
        return torch.cat(self.slots_to(node)) if not node.is_root else self._no_slots, node

    def end_of(self, tokens: array, namespace: Hashable) -> Node | None:
        """The node where `tokens` end, in any tier; split off if need be. None unless all are cached."""
        node, start, end = self.root, 0, len(tokens)
        while start < end:
            child = node.children.get(node.key_of(namespace, tokens[start]))
            if child is None:
                return None
            stop = min(start + len(child), end)
            count = stop - start
            # Compare the last token first: different texts mostly differ there, which saves fetching the others.
            if child.tokens[count - 1] != tokens[stop - 1] or child.tokens[:count] != tokens[start:stop]:
                return None
            node = child if count == len(child) else self.split(child, count)
            start = stop
        return node

    def reads(self, node: Node, spread: int = 0) -> bool:
        """Whether a prefix can be read up to `node`, once it is on the device; see `lock` for `spread`."""
        return self._readable(node, spread) is node

    def _readable(self, node: Node, spread: int | None) -> Node:
        """Where all parts together have a prefix end, up to `node`; some may need it to end earlier still."""
        for part in self.parts:
            node = part.readable(node, spread)
        return node

    def slots_to(self, node: Node) -> list[torch.Tensor]:
        """The slots from the root to the end of `node`, which is on the device, in pieces; int64."""
        return [each.slots for each in node.path()]

    # Adding

    def add(self, tokens: array, namespace: Hashable, slots: torch.Tensor, priority: int, computed_start: int) -> Added:
        """Make `tokens` resident in `slots` (int64), except for those that the device has already.

        Tree slots that have lost their window KV take that of `slots`. A pass may still write to it, so both share it
        until the caller says that none does.

        computed_start: for how many of the first tokens the caller has no window KV of its own.
        """
        node, count = self._descend(tokens, namespace)
        num_present, only_on_host = count, []
        above = node
        while above.slots is None:
            start = num_present - len(above)
            above.slots = slots[start:num_present].clone()  # a part of it would keep all of `slots`
            only_on_host.append(above)
            num_present, above = start, above.parent
        self.came(reversed(only_on_host))
        if count < len(tokens):
            node = self._new_leaf(node, tokens[count:], namespace)
            node.slots = slots[count:].clone()
            self.came([node])
        self.use(node)
        above = node
        while not above.is_root:
            above.priority = max(above.priority, priority)
            above = above.parent
        lent = [part.added(node, slots, num_present, computed_start) for part in self.parts]
        return Added(num_present, node, torch.cat(lent) if lent else slots[:0])

    # Use

    def use(self, node: Node, priority: int | None = None, spread: int = 0) -> None:
        """Count a use of everything up to `node`.

        priority: of the request that uses it; None for a lookup, which makes KV recent but is not a hit.
        """
        now, end = next(self._clock), node
        while not node.is_root:
            node.last_use = now
            if priority is not None:
                node.hits += 1
                node.priority = max(node.priority, priority)
            node = node.parent
        for part in self.parts:
            part.used(end, spread)

    def lock(self, node: Node, spread: int = 0) -> int:
        """Lock a node on the device, with its ancestors, for one more holder; returns the change in evictable tokens.

        spread: from how many tokens before its end on text may read up to there: as much more of what parts keep for
            the last tokens alone is locked as well.
        """
        self.num_locks += not node.is_root
        change, above = 0, node
        while not above.is_root:
            above.locks += 1
            if above.locks == 1:
                change -= len(above)
                self._leaves.discard(above)
            above = above.parent
        self._count(change)
        for part in self.parts:
            part.lock(node, spread)
        return change

    def unlock(self, node: Node, spread: int = 0) -> int:
        """Release one holder's lock; returns the same."""
        for part in self.parts:
            part.unlock(node, spread)
        self.num_locks -= not node.is_root
        change = 0
        while not node.is_root:
            node.locks -= 1
            if not node.locks:
                change += len(node)
                self._offer(node)
            node = node.parent
        self._count(change)
        return change

    def _count(self, change: int) -> None:
        self.num_evictable += change
        self.num_locked -= change

    # Leaving

    def evict(self, num_tokens: int) -> int:
        """Evict leaves from the device and free their slots, until they held `num_tokens` or none is left; returns how
        many they held."""
        if num_evicted := len(slots := self.take(num_tokens)):
            self.allocator.free(slots)
        return num_evicted

    def take(self, num_tokens: int) -> torch.Tensor:
        """The same, but the caller gets the slots, in the order in which parts are told of their nodes."""
        pieces = [self._no_slots]
        num_evicted = 0
        while num_evicted < num_tokens:
            if (leaf := self._leaves.pop()) is not None:
                self.watcher.evicted(leaf)
                pieces.append(self._leave(leaf))
                num_evicted += len(pieces[-1])
            elif not self.release_lock():
                break
        return torch.cat(pieces[1:] or pieces)

    def oldest(self) -> int | None:
        """When the leaf that would be evicted next was last used; None if there is none."""
        leaves = self.next_leaves(1)
        return leaves[0].last_use if leaves else None

    def is_held(self, node: Node) -> bool:
        """Whether anybody holds `node`, on the device or elsewhere."""
        return node.locks > 0 or any(part.holds(node) for part in self.parts)

    def discard(self, node: Node) -> bool:
        """Remove a node from all tiers if nobody holds it and nothing follows it; returns whether that was so."""
        if node.is_root or node.children or self.is_held(node):
            return False
        if node.slots is not None:
            self.allocator.free(self._leave(node))
        if node.parent.children.get(node.parent.key_of(node.namespace, node.tokens[0])) is node:
            self.drop(node)
        return True

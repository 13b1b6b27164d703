"""The radix tree that owns the KV of chunks and of linked requests' text.

It knows of no model and of no tier: beside slots on the device, nodes may hold *parts*, such as window KV or a copy on
the host, each kept by a component with rules of its own.
"""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sglang_lazy.cache.eviction import EvictionHeap
from sglang_lazy.cache.node import Node, Order
from sglang_lazy.cache.parts import Part, Watcher


class Allocator(Protocol):
    """The device's slots, as SGLang's allocators hand them out."""

    size: int
    device: torch.device

    def available_size(self) -> int: ...

    def free(self, slots: torch.Tensor) -> None: ...


class Added(NamedTuple):
    """The result of `RadixTree.add`.

    num_present: how many of the tokens the device had already, in the tree's own slots.  node: where the tokens end.
    lent: int64, the caller's slots whose window KV the tree has taken for its own slots.
    """

    num_present: int
    node: Node
    lent: torch.Tensor


class RadixTree:
    """A radix tree over token ids, with namespaces.

    When a node is split it keeps its end: the new node is its parent. The ancestors of a node with slots have slots.
    Recency is a tick of a counter, and ties are broken by node id, so all tensor-parallel ranks evict alike.

    order: of eviction, one of `ORDERS`.
    clock: yields growing numbers; trees whose ages are compared share one.
    release_lock: has a waiting request give up its locks when nothing is evictable; returns False if none holds any.
    parts: the components, set once at start.
    num_evictable, num_locked: tokens on the device.  num_locks: locks held, counted where they were taken.
    """

    def __init__(
        self,
        allocator: Allocator,
        order: Order,
        clock: Iterator[int] | None = None,
        watcher: Watcher | None = None,
        release_lock: Callable[[], bool] = lambda: False,
    ):
        self.allocator, self.watcher, self.release_lock = allocator, watcher or Watcher(), release_lock
        self.parts: tuple[Part, ...] = ()
        self._order, self._clock = order, clock or itertools.count(1)
        self._no_slots = torch.empty(0, dtype=torch.int64, device=allocator.device)
        self.reset()

    def reset(self) -> None:
        """Forget all nodes, whose slots the caller frees. Holders of nodes find them without slots and copies."""
        left: list[Node] = [self.root] if hasattr(self, "root") else []
        while left:
            node = left.pop()
            left += node.children.values()
            node.children.clear()  # cyclic references would leave the nodes to the garbage collector
            node.slots = node.host = node.window = None
        self.root: Node = Node(None, array("q"), None, self._no_slots)
        self.num_evictable = self.num_locked = self.num_locks = 0
        self._leaves: set[Node] = set()  # on the device, and evictable
        self._heap = EvictionHeap(self._order)
        for part in self.parts:
            part.reset()

    # Reading

    def find(self, tokens: array, namespace: Any, complete: bool = False) -> tuple[torch.Tensor, Node]:
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

    def end_of(self, tokens: array, namespace: Any) -> Node | None:
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

    def add(self, tokens: array, namespace: Any, slots: torch.Tensor, priority: int, computed_start: int) -> Added:
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

    def grow(self, tokens: array, namespace: Any) -> tuple[Node, int, Node | None]:
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

    def _new_leaf(self, parent: Node, tokens: array, namespace: Any) -> Node:
        leaf = Node(parent, tokens, namespace, None)
        leaf.last_use = next(self._clock)
        parent.children[parent.key_of(namespace, tokens[0])] = leaf
        return leaf

    def _descend(self, tokens: array, namespace: Any) -> tuple[Node, int]:
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

    def _offer(self, node: Node) -> None:
        """Make a node evictable if nothing holds it and nothing on the device follows it."""
        if node.slots is not None and not (node.locks or node.num_below or node.is_root):
            self._leaves.add(node)
            self._heap.push(node, self._leaves)

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
            if (leaf := self._heap.pop(self._leaves)) is not None:
                self.watcher.evicted(leaf)
                pieces.append(self._leave(leaf))
                num_evicted += len(pieces[-1])
            elif not self.release_lock():
                break
        return torch.cat(pieces[1:] or pieces)

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
        while num_tokens > 0 and (leaf := self._heap.pop(self._leaves)) is not None:
            leaves.append(leaf)
            num_tokens -= len(leaf)
        for leaf in leaves:
            self._heap.push(leaf, self._leaves)
        return leaves

    def oldest(self) -> int | None:
        """When the leaf that would be evicted next was last used; None if there is none."""
        leaves = self.next_leaves(1)
        return leaves[0].last_use if leaves else None

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

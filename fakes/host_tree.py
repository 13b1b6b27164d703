"""A small radix tree with a host tier, whose KV tells what it was computed from."""

import hashlib
from array import array
from typing import Any

import torch

from fakes import streams
from fakes.late_copies import LateCopies
from sglang_lazy.cache.host import HostKV
from sglang_lazy.cache.host_memory import CpuCopies, HostMemory
from sglang_lazy.cache.host_tree import Watcher
from sglang_lazy.cache.transfers import Transfers
from sglang_lazy.core.keys import Namespace

CHUNKS = Namespace("chunk", None, None)
LAYERS, ROW = 2, 8


class Node:
    """A node as `HostKV` knows it."""

    count = 0

    def __init__(self, parent: "Node | None", tokens: array, namespace: Any):
        Node.count += 1
        self.id, self.parent, self.tokens, self.namespace = Node.count, parent, tokens, namespace
        self.children: dict[Any, Node] = {}
        self.slots: torch.Tensor | None = None
        self.host: Any = None
        self.locks = self.hits = self.used = 0


class Slots:
    """A device's free slots, the lowest first."""

    def __init__(self, size: int):
        self.size, self._free = size, list(range(1, size + 1))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> torch.Tensor:
        assert count <= len(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        assert not set(slots.tolist()) & set(self._free)
        self._free = sorted([*self._free, *slots.tolist()])


class Tree:
    """With `HostKV` over it; copies are late. The KV of a slot is a digest of the tokens up to it."""

    def __init__(self, size: int, host_size: int, **options: Any):
        self.allocator, self.ticks = Slots(size), 0
        self.layers = [[torch.zeros(size + 1, ROW, dtype=torch.uint8) for _ in "kv"] for _ in range(LAYERS)]
        self.root = Node(None, array("i"), None)
        self.memory = HostMemory(self.layers, host_size)
        self.transfers = Transfers(self.memory, LateCopies(CpuCopies(self.memory), self.memory), streams)
        self.events: list[tuple[str, Any]] = []
        self.host = HostKV(
            self,
            self.memory,
            self.transfers,
            self.allocator,
            lambda node: node.used,
            watcher=self._watcher(),
            **options,
        )

    def _watcher(self) -> Watcher:
        watcher = Watcher()
        for name in ("stored", "removed", "copied", "gave_up"):
            setattr(watcher, name, lambda what, name=name: self.events.append((name, what)))
        return watcher

    # For tests

    def nodes(self) -> list[Node]:
        found, left = [], list(self.root.children.values())
        while left:
            found.append(node := left.pop())
            left += node.children.values()
        return found

    def path(self, node: Node) -> list[Node]:
        path = []
        while node is not self.root:
            path.append(node)
            node = node.parent
        return path[::-1]

    def kv(self, node: Node) -> list[list[bytes]]:
        """What the slots of `node` should hold, in every buffer."""
        before = array("i", [token for each in self.path(node) for token in each.tokens])
        starts = range(len(before) - len(node.tokens), len(before))
        return [
            [hashlib.sha256(before[: i + 1].tobytes() + bytes((layer, place))).digest()[:ROW] for i in starts]
            for place in range(2)
            for layer in range(LAYERS)
        ]

    def on_device(self, node: Node) -> list[list[bytes]]:
        return [
            [bytes(row) for row in self.layers[layer][place][node.slots].tolist()]
            for place in range(2)
            for layer in range(LAYERS)
        ]

    def on_host(self, slots: torch.Tensor) -> list[list[bytes]]:
        return [[bytes(row) for row in buffer[slots].tolist()] for buffer in self.memory.groups[0].host]

    def use(self, node: Node) -> None:
        self.ticks += 1
        for each in self.path(node):
            each.used = self.ticks
            each.hits += 1

    def add(self, tokens: list[int], namespace: Any = CHUNKS) -> Node | None:
        """Compute and publish `tokens`; None if there is no room. What is only on the host is not added to."""
        node, known = self.deepest(array("i", tokens), namespace)
        if node is not self.root and node.slots is None:
            return None
        count = len(tokens) - known
        if count:
            self.lock(node)
            lacking = count - self.allocator.available_size()
            fits = lacking <= 0 or lacking <= self.evictable_size() and self.evict(lacking) >= lacking
            self.unlock(node)
            if not fits:
                return None
            node = self.sprout(node, array("i", tokens[known:]), namespace)
            node.slots = self.allocator.alloc(count)
            buffers = [layer[place] for place in range(2) for layer in self.layers]
            for buffer, rows in zip(buffers, self.kv(node), strict=True):
                buffer[node.slots] = torch.tensor([list(row) for row in rows], dtype=torch.uint8)
        self.use(node)
        return node

    # As the host tier wants it

    def lock(self, node: Node) -> None:
        for each in self.path(node):
            assert each.slots is not None
            each.locks += 1

    def unlock(self, node: Node) -> None:
        for each in self.path(node):
            assert each.locks
            each.locks -= 1

    def evictable_size(self) -> int:
        return sum(len(node.slots) for node in self.nodes() if node.slots is not None and not node.locks)

    def _leaves(self) -> list[Node]:
        return sorted(
            (
                node
                for node in self.nodes()
                if node.slots is not None
                and not node.locks
                and all(child.slots is None for child in node.children.values())
            ),
            key=lambda node: (node.used, node.id),
        )

    def next_leaves(self, num_tokens: int) -> list[Node]:
        found: list[Node] = []
        for node in self._leaves():
            if num_tokens <= 0:
                break
            num_tokens -= len(node.tokens)
            found.append(node)
        return found

    def evict(self, num_tokens: int) -> int:
        num_evicted = 0
        while num_evicted < num_tokens and (leaves := self._leaves()):
            num_evicted += self.remove(leaves[0])
        return num_evicted

    def remove(self, leaf: Node) -> int:
        count = len(leaf.slots)
        self.allocator.free(leaf.slots)
        leaf.slots = None
        if not self.host.left_device(leaf, count):
            self.drop(leaf)
        return count

    def discard(self, node: Node) -> None:
        assert not (node.children or node.locks or self.host.is_read(node))
        if node.slots is not None:
            self.allocator.free(node.slots)
        node.slots = None
        self.host.discard(node)
        self.drop(node)

    def came(self, nodes: Any) -> None:
        assert all(node.parent is self.root or node.parent.slots is not None for node in nodes)

    def drop(self, node: Node) -> None:
        assert node.slots is None and node.host is None and not node.children
        del node.parent.children[self._key(node.parent, node.tokens, node.namespace)]
        self.host.lost_child(node.parent)

    def _key(self, parent: Node, tokens: array, namespace: Any) -> Any:
        return (namespace, tokens[0]) if parent is self.root else tokens[0]

    def deepest(self, tokens: array, namespace: Any) -> tuple[Node, int]:
        node, start = self.root, 0
        while start < len(tokens):
            child = node.children.get(self._key(node, tokens[start:], namespace))
            if child is None:
                break
            count = 0
            while count < min(len(child.tokens), len(tokens) - start) and child.tokens[count] == tokens[start + count]:
                count += 1
            start += count
            if count < len(child.tokens):
                return self._split(child, count), start
            node = child
        return node, start

    def _split(self, node: Node, count: int) -> Node:
        above = Node(node.parent, node.tokens[:count], node.namespace)
        above.locks, above.hits, above.used = node.locks, node.hits, node.used
        above.parent.children[self._key(above.parent, above.tokens, above.namespace)] = above
        node.tokens, node.parent = node.tokens[count:], above
        above.children[node.tokens[0]] = node
        if node.slots is not None:
            above.slots, node.slots = node.slots[:count], node.slots[count:]
        self.host.split(above, node)
        return above

    def sprout(self, node: Node, tokens: array, namespace: Any) -> Node:
        leaf = Node(node, tokens, namespace)
        leaf.used = node.used
        node.children[self._key(node, tokens, namespace)] = leaf
        return leaf

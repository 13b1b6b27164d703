"""A radix tree with a host tier, whose KV tells what it was computed from."""

import hashlib
from array import array
from collections.abc import Iterable
from typing import Any

import torch

from fakes.late_copies import late_transfers
from sglang_lazy.cache.host import HostKV
from sglang_lazy.cache.host_copy import HostWatcher
from sglang_lazy.cache.host_memory import HostMemory
from sglang_lazy.cache.host_states import HostStates
from sglang_lazy.cache.node import ORDERS, Node
from sglang_lazy.cache.states import States
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.core.keys import Namespace, of_chunks
from sglang_lazy.recurrent.pool import StateLayout, StatePool

CHUNKS = Namespace("chunk", None, None)
LAYERS, ROW = 2, 8
LAYOUT = StateLayout(LAYERS, ((1, 2),), torch.float32, (1, 2, 3), torch.float32, "number")
"""Of states: each layer has 8, 24 and 4 bytes of one."""


class Slots:
    """A device's free slots, the lowest first."""

    device = torch.device("cpu")

    def __init__(self, size: int):
        self.size = size
        self.clear()

    def clear(self) -> None:
        self._free = list(range(1, self.size + 1))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> torch.Tensor | None:
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        assert not set(slots.tolist()) & set(self._free)
        self._free = sorted([*self._free, *slots.tolist()])


class Device:
    """The slots of one tree."""

    def __init__(self, tree: RadixTree):
        self._tree, self.size, self.take = tree, tree.allocator.size, tree.take
        slots = tree.allocator
        self.alloc, self.free, self.available_size = slots.alloc, slots.free, slots.available_size

    def evictable_size(self) -> int:
        return self._tree.num_evictable


class Recorder(HostWatcher):
    """Notes what it is told."""

    def __init__(self, events: list[tuple[str, Any]]):
        self._events = events

    def stored(self, node: Node) -> None:
        self._events.append(("stored", node))

    def removed(self, node: Node) -> None:
        self._events.append(("removed", node))

    def copied(self, node: Node) -> None:
        self._events.append(("copied", node))

    def loaded(self, node: Node) -> None:
        self._events.append(("loaded", node))

    def gave_up(self, num_tokens: int) -> None:
        self._events.append(("gave up", num_tokens))


class Tree(RadixTree):
    """With a host tier whose copies are late. The KV of a slot is a digest of the tokens up to it, and so is a state.

    num_states: of recurrent layers, on the device; the host has as many for its KV.
    events: what happened on the host.
    """

    def __init__(self, size: int, host_size: int, num_states: int = 0, **options: Any):
        super().__init__(Slots(size), ORDERS["lru"])
        self.layers = [[torch.zeros(size + 1, ROW, dtype=torch.uint8) for _ in "kv"] for _ in range(LAYERS)]
        self.memory = HostMemory(self.layers, host_size)
        self.states: States | None = None
        if num_states:
            self.states = States(self, pool := StatePool(LAYOUT, num_states, "cpu"))
            of_states = HostStates(self.states, HostMemory(pool.layers, host_size * num_states // size))
            options["states"] = of_states
        self.transfers = late_transfers(self.memory, of_states.memory if num_states else None)
        self.events: list[tuple[str, Any]] = []
        watchers = [Recorder(self.events)]
        memory = Device(self), self.memory, self.transfers
        self.host = HostKV(self, *memory, ORDERS["lru"], watchers=watchers, **options)
        self.parts = (self.host,) if self.states is None else (self.states, self.host)

    # For tests

    def nodes(self) -> list[Node]:
        found, left = [], list(self.root.children.values())
        while left:
            found.append(node := left.pop())
            left += node.children.values()
        return found

    def kv(self, node: Node) -> list[list[bytes]]:
        """What the slots of `node` should hold, in every buffer."""
        before = array("q", [token for each in node.path() for token in each.tokens])
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

    def compute(self, tokens: list[int], namespace: Any = CHUNKS) -> Node | None:
        """Compute and add `tokens`; None if there is no room."""
        ids = array("q", tokens)
        lacking = len(ids) - self.allocator.available_size()
        if lacking > 0 and self.evict(lacking) < lacking:
            return None
        slots = self.allocator.alloc(len(ids))
        num_present, node, _ = self.add(ids, namespace, slots, 0, 0)
        self.use(node, 0)
        self.allocator.free(slots[:num_present])
        start = len(ids)
        for each in reversed(node.path()):
            start -= len(each)
            if start >= num_present:
                self.write(each)
        if self.states is not None and of_chunks(namespace) and not self.states.has(node):
            self.lock(node)
            (slot,) = self.states.allocate(1)
            self.states.give(node, slot)
            for buffer, row in zip(_buffers(self.states.pool.layers), self.state(node), strict=True):
                buffer[slot].view(torch.uint8).view(-1).copy_(torch.tensor([*row], dtype=torch.uint8))
            self.unlock(node)
        return node

    def state(self, node: Node) -> list[bytes]:
        """What the state at the end of `node` should be, in every buffer."""
        tokens = array("q", [token for each in node.path() for token in each.tokens])
        return [
            hashlib.sha256(tokens.tobytes() + bytes((i,))).digest()[: buffer[0].nbytes]
            for i, buffer in enumerate(_buffers(self.states.pool.layers))
        ]

    def state_on_device(self, node: Node) -> list[bytes]:
        return [_bytes(buffer[node.state.slot]) for buffer in _buffers(self.states.pool.layers)]

    def state_on_host(self, slot: torch.Tensor) -> list[bytes]:
        groups = self.host.states.memory.groups
        return [bytes(buffer[slot].flatten().tolist()) for rows in groups for buffer in rows.host]

    def write(self, node: Node) -> None:
        """Compute the KV of a node."""
        buffers = [layer[place] for place in range(2) for layer in self.layers]
        for buffer, rows in zip(buffers, self.kv(node), strict=True):
            buffer[node.slots] = torch.tensor([list(row) for row in rows], dtype=torch.uint8)


def _buffers(layers: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """In the host's order: the first of each layer, then the second ones."""
    return [layer[place] for place in range(len(layers[0])) for layer in layers]


def _bytes(row: torch.Tensor) -> bytes:
    return bytes(row.contiguous().view(torch.uint8).flatten().tolist())


def host_used(tree: Tree) -> int:
    return tree.memory.slots.size - tree.memory.slots.num_free


def check(tree: Tree, held: Iterable[torch.Tensor] = (), held_states: Iterable[torch.Tensor] = ()) -> None:
    """Slots add up, and nodes that are not being copied hold what was computed.  held, held_states: slots of the
    host that no node has."""
    if tree.states is not None:
        _check_states(tree, [slot for slots in held_states for slot in slots.tolist()])
    tree_host, tree_device = [], []
    copying = [node for some in tree.host._under_way for transfer in some for node in transfer.nodes]
    for node in tree.nodes():
        assert node.slots is not None or node.host is not None
        if not node.parent.is_root:
            assert node.slots is None or node.parent.slots is not None
            assert node.host is None or node.parent.host is not None
        if node.slots is not None:
            assert len(node.slots) == len(node.tokens)
            tree_device += node.slots.tolist()
            if not tree.host.loading(node):
                assert tree.on_device(node) == tree.kv(node)
        if node.host is not None:
            assert len(node.host.slots) == len(node.tokens)
            tree_host += node.host.slots.tolist()
            if node.host.transfer is None:
                assert tree.on_host(node.host.slots) == tree.kv(node)
            else:
                assert node in copying and node.locks
        is_host_leaf = node.slots is None and not node.children
        assert (node in tree.host._leaves) == is_host_leaf
    assert len(tree.host._leaves) == sum(node.slots is None and not node.children for node in tree.nodes())
    held = [slot for slots in held for slot in slots.tolist()]
    assert len({*tree_host, *held}) == len(tree_host) + len(held) == host_used(tree)
    assert len(set(tree_device)) == len(tree_device) == tree.allocator.size - tree.allocator.available_size()


def _check_states(tree: Tree, held: list[int]) -> None:
    """The same of states, whose nodes are chunks' ends."""
    on_device, on_host = [], []
    for node in tree.nodes():
        if tree.states.has(node):
            on_device.append(node.state.slot)
            if not tree.host.loading(node):
                assert tree.state_on_device(node) == tree.state(node)
        if node.host is not None and node.host.state is not None:
            on_host += node.host.state.tolist()
            if node.host.transfer is None:
                assert tree.state_on_host(node.host.state) == tree.state(node)
    pool, slots = tree.states.pool, tree.host.states.memory.slots
    assert len({*on_device}) == len(on_device) == pool.size - pool.available_size()
    assert len({*on_host, *held}) == len(on_host) + len(held) == slots.size - slots.num_free

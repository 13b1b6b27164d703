"""The tree against a model of single tokens: which prefixes it holds, where, who locks them, when they were used."""

import random
from array import array

import pytest
import torch

from sglang_lazy.cache.node import ORDERS, Node
from sglang_lazy.cache.parts import Part, Watcher
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.cache.windows import Windows
from sglang_lazy.core.keys import Namespace

WINDOW = 3
NAMESPACES = [None, "tenant", Namespace("chunk", None, None), Namespace("text", None, None, "path")]


class Slots:
    """An allocator that notices what is freed twice. With windows, slots get window slots of a smaller pool."""

    device = torch.device("cpu")

    def __init__(self, size: int, num_windows: int = 0):
        self.size, self.left = size, set(range(size))
        self.windows: dict[int, int] = {}  # by slot
        self.free_windows = set(range(num_windows))

    def available_size(self) -> int:
        return len(self.left)

    def alloc(self, count: int, windows: bool = False) -> torch.Tensor:
        taken = random.sample(sorted(self.left), count)
        self.left.difference_update(taken)
        if windows:
            self.windows.update((slot, self.free_windows.pop()) for slot in taken)
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        freed = slots.tolist()
        assert len(set(freed)) == len(freed) and self.left.isdisjoint(freed), "freed twice"
        self.left.update(freed)
        self.drop_windows(freed)

    def drop_windows(self, slots: list[int]) -> None:
        for slot in slots:
            if (window := self.windows.pop(slot, None)) is not None:
                assert window not in self.free_windows, "freed twice"
                self.free_windows.add(window)


class WindowPool:
    window = WINDOW

    def __init__(self, slots: Slots):
        self.slots, self.size = slots, len(slots.free_windows)

    def available_size(self) -> int:
        return len(self.slots.free_windows)

    def share(self, slots: torch.Tensor, lenders: torch.Tensor) -> None:
        for slot, lender in zip(slots.tolist(), lenders.tolist(), strict=True):
            assert slot not in self.slots.windows, "a window slot would be lost"
            self.slots.windows[slot] = self.slots.windows[lender]

    def free(self, slots: torch.Tensor) -> None:
        self.slots.drop_windows(slots.tolist())

    def take(self, lent: torch.Tensor) -> None:
        for slot in lent.tolist():
            del self.slots.windows[slot]


Prefix = tuple  # (namespace, tokens)


class Model:
    """What the tree should hold, token by token: each is the last of its prefix."""

    def __init__(self) -> None:
        self.slot: dict[Prefix, int] = {}
        self.locks: dict[Prefix, int] = {}
        self.used: dict[Prefix, int] = {}
        self.time = 0

    def prefixes(self, tokens: array, namespace) -> list[Prefix]:
        return [(namespace, tuple(tokens[: i + 1])) for i in range(len(tokens))]

    def num_held(self, tokens: array, namespace) -> int:
        held = 0
        for prefix in self.prefixes(tokens, namespace):
            if prefix not in self.slot:
                break
            held += 1
        return held

    def use(self, tokens: array, namespace) -> None:
        self.time += 1
        self.used.update(dict.fromkeys(self.prefixes(tokens, namespace), self.time))

    def lock(self, tokens: array, namespace, change: int) -> None:
        for prefix in self.prefixes(tokens, namespace):
            self.locks[prefix] = self.locks.get(prefix, 0) + change

    def num_locked(self) -> int:
        return sum(self.locks.get(prefix, 0) > 0 for prefix in self.slot)

    def leaves(self) -> set[Prefix]:
        """The ends of what could be evicted next."""
        followed = {(namespace, tokens[:-1]) for namespace, tokens in self.slot}
        return {prefix for prefix in self.slot if prefix not in followed and not self.locks.get(prefix)}


def tokens_to(node: Node) -> array:
    pieces = []
    while not node.is_root:
        pieces.append(node.tokens)
        node = node.parent
    return sum(reversed(pieces), array("q"))


def random_tokens(rng: random.Random) -> array:
    return array("q", rng.choices(range(3), k=rng.randint(1, 9)))


@pytest.mark.parametrize("seed", range(12))
def test_tree_holds_what_a_model_of_single_tokens_holds(seed):
    rng = random.Random(seed)
    random.seed(seed)
    slots, model, held = Slots(60), Model(), []
    tree = RadixTree(slots, ORDERS["lru"])
    for _ in range(1000):
        tokens, namespace = random_tokens(rng), rng.choice(NAMESPACES)
        act = rng.random()
        num_held = model.num_held(tokens, namespace)
        if act < 0.35:
            lacking = len(tokens) - num_held - slots.available_size()
            if lacking > 0:
                _evict(tree, model, lacking)
                num_held = model.num_held(tokens, namespace)
            if len(tokens) - num_held > slots.available_size():
                continue
            own = torch.full([len(tokens)], -1, dtype=torch.int64)  # poison where the tree has its own
            own[num_held:] = slots.alloc(len(tokens) - num_held)
            added = tree.add(tokens, namespace, own, 0, 0)
            assert added.num_present == num_held and tokens_to(added.node) == tokens and not len(added.lent)
            new = zip(model.prefixes(tokens, namespace)[num_held:], own[num_held:].tolist(), strict=True)
            model.slot.update(new)
            model.use(tokens, namespace)
        elif act < 0.6:
            found, node = tree.find(tokens, namespace)
            expected = model.prefixes(tokens, namespace)[:num_held]
            assert found.tolist() == [model.slot[prefix] for prefix in expected]
            assert tokens_to(node) == tokens[:num_held]
            model.use(tokens[:num_held], namespace)
            if rng.random() < 0.6 and num_held:
                assert tree.lock(node) == -sum(not model.locks.get(prefix) for prefix in expected)
                model.lock(tokens[:num_held], namespace, 1)
                held.append((node, tokens[:num_held], namespace))
        elif act < 0.7:
            node = tree.end_of(tokens, namespace)
            assert (node is None) == (num_held < len(tokens))
            assert node is None or tokens_to(node) == tokens
        elif act < 0.9 and held:
            node, tokens, namespace = held.pop(rng.randrange(len(held)))
            model.lock(tokens, namespace, -1)
            expected = sum(not model.locks[prefix] for prefix in model.prefixes(tokens, namespace))
            assert tree.unlock(node) == expected
        elif act < 0.98:
            _evict(tree, model, rng.randint(1, 8))
        elif (node := tree.end_of(tokens, namespace)) is not None:
            is_free = node.locks == 0 and not node.children
            assert tree.discard(node) == is_free
            _forget_what_left(tree, model)
        _check(tree, model, slots, held)
    for node, *_ in held:
        tree.unlock(node)
    assert tree.evict(1000) + slots.available_size() >= slots.size and len(slots.left) == slots.size


def _evict(tree: RadixTree, model: Model, num_tokens: int) -> None:
    evictable = tree.num_evictable
    num_evicted = tree.evict(num_tokens)
    assert num_evicted >= min(num_tokens, evictable)
    before = dict(model.used)
    gone = _forget_what_left(tree, model)
    assert len(gone) == num_evicted and not any(model.locks.get(prefix) for prefix in gone)
    left = [before[prefix] for prefix in model.leaves()]
    assert not gone or not left or max(before[prefix] for prefix in gone) <= min(left), "a younger leaf went first"


def _forget_what_left(tree: RadixTree, model: Model) -> set[Prefix]:
    gone = set(model.slot) - set(_held_by(tree))
    for prefix in gone:
        del model.slot[prefix]
        model.used.pop(prefix, None)
    return gone


def _held_by(tree: RadixTree) -> dict[Prefix, int]:
    """Walks all nodes, without the tree's own methods."""
    held, left = {}, [(tree.root, ())]
    while left:
        node, before = left.pop()
        for child in node.children.values():
            assert child.parent is node and len(child.tokens)
            after = before + tuple(child.tokens)
            if child.slots is not None:
                assert len(child.slots) == len(child.tokens)
                ends = range(len(before) + 1, len(after) + 1)
                held.update({(child.namespace, after[:i]): s for i, s in zip(ends, child.slots.tolist(), strict=True)})
            left.append((child, after))
    return held


def _check(tree: RadixTree, model: Model, slots: Slots, held: list) -> None:
    assert _held_by(tree) == model.slot
    assert tree.num_locked == model.num_locked()
    assert tree.num_evictable == len(model.slot) - model.num_locked()
    assert slots.available_size() + len(model.slot) == slots.size
    assert tree.num_locks == len(held)


@pytest.mark.parametrize("seed", range(12))
def test_prefixes_are_read_as_far_as_their_window_kv_goes(seed):
    rng = random.Random(seed)
    random.seed(seed)
    slots = Slots(80, num_windows=40)
    pool, held = WindowPool(slots), []
    tree = RadixTree(slots, ORDERS["lru"])
    windows = Windows(tree, pool)
    tree.parts = (windows,)
    for _ in range(900):
        tokens, namespace = random_tokens(rng), rng.choice(NAMESPACES)
        act = rng.random()
        if act < 0.45:
            found, node = tree.find(tokens, namespace)
            tree.lock(node)  # as a row that computes the rest does
            count = len(tokens) - len(found)
            windows.evict(count - pool.available_size())
            tree.evict(count - slots.available_size())
            if count <= min(pool.available_size(), slots.available_size()):
                own = torch.cat([found, slots.alloc(count, windows=True)])
                added = tree.add(tokens, namespace, own, 0, len(found))
                pool.take(added.lent)
                slots.free(own[len(found) : added.num_present])
                assert tree.reads(added.node)
                assert tree.find(tokens, namespace)[0].tolist() == _readable(tree, slots, tokens, namespace)
            tree.unlock(node)
        elif act < 0.7:
            complete = rng.random() < 0.3
            expected = _readable(tree, slots, tokens, namespace, complete)
            found, node = tree.find(tokens, namespace, complete)
            assert found.tolist() == expected
            spread = rng.randint(0, 3)
            if len(found) and tree.reads(node, spread):
                free = windows.num_unlocked(node, spread)
                before = windows.num_evictable
                tree.lock(node, spread)
                assert before - windows.num_evictable == free
                held.append((node, spread))
        elif act < 0.85 and held:
            tree.unlock(*held.pop(rng.randrange(len(held))))
        elif act < 0.95:
            windows.evict(rng.randint(1, 6))
        else:
            tree.evict(rng.randint(1, 6))
        _check_windows(tree, windows, slots, held)
    for node, spread in held:
        tree.unlock(node, spread)
    tree.evict(1000)
    assert len(slots.left) == slots.size and len(slots.free_windows) == pool.size and not windows.num_locked


def _readable(tree: RadixTree, slots: Slots, tokens: array, namespace, complete: bool = False) -> list[int]:
    """The slots of the longest readable prefix, by the definition."""
    held, path = _held_by(tree), []
    for i in range(len(tokens)):
        if (slot := held.get((namespace, tuple(tokens[: i + 1])))) is None:
            break
        path.append(slot)
    while path and not all(slot in slots.windows for slot in (path if complete else path[-WINDOW:])):
        path.pop()
    return path


def _check_windows(tree: RadixTree, windows: Windows, slots: Slots, held: list) -> None:
    in_tree = _held_by(tree)
    assert set(slots.windows) <= set(in_tree.values())
    assert windows.num_evictable + windows.num_locked == len(slots.windows)
    assert len(slots.windows) + len(slots.free_windows) == 40
    assert slots.available_size() + len(in_tree) == slots.size
    for node, spread in held:
        path = torch.cat(tree.slots_to(node)).tolist()
        assert all(slot in slots.windows for slot in path[-(WINDOW + spread) :]), "a locked window was lost"


def test_a_leaf_without_its_window_leaves_and_what_follows_cannot_be_read():
    class Gone(Watcher):
        nodes: list[Node] = []

        def gone(self, node: Node) -> None:
            self.nodes.append(node)

    slots = Slots(40, num_windows=40)
    tree = RadixTree(slots, ORDERS["lru"])
    tree.watcher = watcher = Gone()
    windows = Windows(tree, WindowPool(slots))
    tree.parts = (windows,)
    chunk = NAMESPACES[2]
    beginning = tree.add(array("q", range(6)), chunk, slots.alloc(6, windows=True), 0, 0).node
    found, node = tree.find(array("q", range(8)), chunk)
    near = tree.add(array("q", range(8)), chunk, torch.cat([found, slots.alloc(2, windows=True)]), 0, 6).node
    found, _ = tree.find(array("q", range(12)), chunk)
    far = tree.add(array("q", range(12)), chunk, torch.cat([found, slots.alloc(4, windows=True)]), 0, 8).node
    tree.use(far)  # so the window KV of the beginning is the least recently used
    windows.evict(1)
    assert beginning.window is None and near.window is not None
    assert watcher.nodes == [beginning, near]
    assert not tree.reads(near) and tree.reads(far)


def test_window_kv_leaves_in_the_order_of_its_last_use():
    """Of text, that of a window and a token is used; of a chunk, only what computed it has, until it is found."""
    slots = Slots(40, num_windows=40)
    tree = RadixTree(slots, ORDERS["lru"])
    windows = Windows(tree, WindowPool(slots))
    tree.parts = (windows,)
    beginning = tree.add(array("q", range(4)), None, slots.alloc(4, windows=True), 0, 0).node
    found, _ = tree.find(array("q", range(8)), None)
    end = tree.add(array("q", range(8)), None, torch.cat([found, slots.alloc(4, windows=True)]), 0, 4).node
    text = tree.add(array("q", range(10, 14)), None, slots.alloc(4, windows=True), 0, 0).node
    chunks = [
        tree.add(array("q", range(20 + i, 24 + i)), NAMESPACES[2], slots.alloc(4, windows=True), 0, 0).node
        for i in range(2)
    ]
    tree.use(chunks[0])
    tree.use(end)
    left: list[Node] = []
    while windows.num_evictable:
        windows.evict(1)
        left += [node for node in (beginning, end, text, *chunks) if node.window is None and node not in left]
    assert left == [chunks[1], beginning, text, chunks[0], end]


def test_window_kv_of_a_node_that_was_split_can_be_evicted():
    slots = Slots(10, num_windows=10)
    tree = RadixTree(slots, ORDERS["lru"])
    windows = Windows(tree, WindowPool(slots))
    tree.parts = (windows,)
    tree.add(array("q", range(6)), None, slots.alloc(6, windows=True), 0, 0)
    tree.end_of(array("q", range(2)), None)
    windows.evict(6)
    assert not slots.windows and windows.num_evictable == 0


class EndsNowhereAt(Part):
    """A part without which no prefix can end at a node."""

    def __init__(self, node: Node):
        self.node = node

    def readable(self, node: Node, spread: int | None) -> Node:
        return node.parent if node is self.node else node


def test_a_prefix_ends_where_every_part_lets_it():
    slots = Slots(10)
    tree = RadixTree(slots, ORDERS["lru"])
    tokens = array("q", range(6))
    last = tree.add(tokens, None, slots.alloc(6), 0, 0).node
    middle, first = tree.end_of(tokens[:4], None), tree.end_of(tokens[:2], None)
    tree.parts = (EndsNowhereAt(middle), EndsNowhereAt(last))
    assert tree.find(tokens, None)[1] is first
    assert [tree.reads(node) for node in (first, middle, last)] == [True, False, False]


def test_references_to_nodes_of_a_tree_that_was_reset_say_that_they_are_gone():
    slots = Slots(10)
    tree = RadixTree(slots, ORDERS["lru"])
    node = tree.add(array("q", [1, 2]), None, slots.alloc(2), 0, 0).node
    tree.reset()
    assert node.slots is None and tree.end_of(array("q", [1, 2]), None) is None and tree.num_evictable == 0


@pytest.mark.parametrize("num_uses, protected", [(1, False), (2, True)])
def test_the_second_use_protects_a_node(num_uses, protected):
    """As SGLang's `slru` has it: from newer nodes that nothing has used again."""
    slots = Slots(10)
    tree = RadixTree(slots, ORDERS["slru"])
    old = tree.add(array("q", [1]), None, slots.alloc(1), 0, 0).node
    for _ in range(num_uses):
        tree.use(old, priority=0)
    new = tree.add(array("q", [2]), None, slots.alloc(1), 0, 0).node
    assert tree.next_leaves(2) == ([new, old] if protected else [old, new])


@pytest.mark.parametrize("order", ORDERS)
def test_order_of_eviction(order):
    slots = Slots(10)
    tree = RadixTree(slots, ORDERS[order])
    first, second, third = (tree.add(array("q", [i]), None, slots.alloc(1), i == 1, 0).node for i in range(3))
    for node in (third, first, first, second, third):
        tree.use(node, priority=0)
    tree.use(first)
    expected = {
        "lru": [second, third, first],
        "lfu": [second, third, first],
        "fifo": [first, second, third],
        "filo": [third, second, first],
        "priority": [third, first, second],
        "slru": [second, third, first],
    }[order]
    assert tree.next_leaves(3) == expected
    left = []
    while tree.evict(1):
        left = [node for node in expected if node.slots is None]
        assert left == expected[: len(left)]
    assert len(left) == 3

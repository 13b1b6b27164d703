"""States of recurrent layers in the tree: what can be read, what is evicted, and that no slot is lost."""

import random
from array import array

import pytest
import torch

from sglang_lazy.cache.node import ORDERS
from sglang_lazy.cache.parts import Watcher
from sglang_lazy.cache.states import States
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.core.keys import Namespace
from sglang_lazy.recurrent.pool import StateLayout, StatePool

CHUNK = Namespace("chunk", None, None)


class Slots:
    device, size = torch.device("cpu"), 1000

    def __init__(self):
        self.left = list(range(1, 1000))

    def available_size(self):
        return len(self.left)

    def free(self, slots):
        self.left += slots.tolist()


class Gone(Watcher):
    def __init__(self):
        self.nodes = []

    def gone(self, node):
        self.nodes.append(node)


@pytest.fixture
def tree():
    tree = RadixTree(Slots(), ORDERS["lru"])
    tree.watcher = Gone()
    tree.parts = (States(tree, StatePool(StateLayout(1, ((1, 1),), torch.float32), 4, "cpu")),)
    return tree


def add(tree, tokens, give=True):
    """Add a chunk as a fill does; returns its node."""
    (states,) = tree.parts
    slot = states.allocate(1) if give else []
    slots = torch.tensor([tree.allocator.left.pop() for _ in tokens])
    added = tree.add(array("q", tokens), CHUNK, slots, 0, 0)
    tree.allocator.free(slots[: added.num_present])
    if give and not states.give(added.node, *slot):
        states.pool.free(slot)
    return added.node


def found(tree, tokens):
    return len(tree.find(array("q", tokens), CHUNK)[0])


def num_lost(tree):
    (states,) = tree.parts
    return states.pool.size - states.pool.available_size() - states.num_evictable - states.num_locked


def test_only_the_end_of_what_has_a_state_can_be_read(tree):
    """Neither a beginning, nor what follows; a chunk that begins a longer one has its own."""
    add(tree, [1, 2, 3], give=False)
    assert found(tree, [1, 2, 3]) == 0
    add(tree, [1, 2, 3])
    assert [found(tree, tokens) for tokens in ([1, 2, 3], [1, 2], [1, 2, 3, 4])] == [3, 0, 3]
    long, short = add(tree, [1, 2, 3, 4, 5]), add(tree, [1, 2])
    assert [found(tree, [1, 2, 3, 4, 5][:n]) for n in range(6)] == [0, 0, 2, 3, 3, 5]
    assert tree.reads(long) and tree.reads(short)


def test_a_second_state_for_a_node_stays_its_owners(tree):
    (states,) = tree.parts
    node = add(tree, [1, 2])
    slot = states.slot(node)
    add(tree, [1, 2])
    assert states.slot(node) == slot and states.pool.available_size() == 3


def test_the_least_recently_used_goes_first(tree):
    """With its KV if it is a leaf; otherwise alone, and whoever knows its chunk is told."""
    nodes = [add(tree, [i, i]) for i in range(4)]
    tree.use(nodes[0])
    inner = nodes[2]
    add(tree, [2, 2, 9], give=False)
    for expected in (nodes[1], inner):
        add(tree, [10, len(tree.watcher.nodes)])
        assert tree.watcher.nodes[-1] is expected
    assert nodes[1].slots is None and inner.slots is not None and found(tree, [2, 2]) == 0


def test_answers_leave_most_of_the_pool_to_chunks(tree):
    """The oldest of them goes, although chunks are older; and one that is read does not count."""
    (states,) = tree.parts
    chunks = [add(tree, [i, i]) for i in range(2)]
    for i in range(3):
        slots = torch.tensor([tree.allocator.left.pop()])
        answer = tree.add(array("q", [i]), Namespace("text", None, None, "path"), slots, 0, 0).node
        assert states.give(answer, states.for_text())
        assert (states.num_evictable, states.pool.available_size()) == (3, 1)
    tree.lock(answer)
    states.pool.free([states.for_text()])
    assert states.has(answer) and all(map(states.has, chunks))


def test_a_locked_state_stays(tree):
    """A lock on a longer chunk holds that one's state, and only the KV of what it begins with."""
    (states,) = tree.parts
    short, long = add(tree, [1, 2]), add(tree, [1, 2, 3])
    tree.lock(long)
    assert (states.num_locked, states.num_evictable) == (1, 1)
    assert states.num_unlocked([short, long]) == 1
    add(tree, [7])
    add(tree, [8])
    states.pool.free(states.allocate(3))
    assert (found(tree, [1, 2]), found(tree, [1, 2, 3])) == (0, 3) and short.slots is not None
    with pytest.raises(RuntimeError, match="out of states"):
        states.allocate(4)
    tree.unlock(long)
    assert len(states.allocate(4)) == 4 and long.slots is None


def test_a_state_goes_with_its_kv(tree):
    add(tree, [1, 2])
    tree.evict(2)
    assert tree.parts[0].pool.available_size() == 4


def test_a_lock_may_come_before_the_state(tree):
    (states,) = tree.parts
    node = add(tree, [1, 2], give=False)
    tree.lock(node)
    assert states.give(node, *states.allocate(1)) and (states.num_locked, states.num_evictable) == (1, 0)
    tree.unlock(node)
    assert (states.num_locked, states.num_evictable) == (0, 1)


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_lost(tree, seed):
    """Whatever is added, locked, evicted and discarded, in any order."""
    dice, (states,), locked = random.Random(seed), tree.parts, []
    for _ in range(400):
        kind = dice.randrange(6)
        if kind < 2 and states.num_locked < states.pool.size:
            add(tree, [dice.randrange(3) for _ in range(dice.randint(1, 4))], give=dice.random() < 0.7)
        elif kind == 2 and len(locked) < 3:
            node = tree.find(array("q", [dice.randrange(3) for _ in range(4)]), CHUNK)[1]
            tree.lock(node)
            locked.append(node)
        elif kind == 3 and locked:
            tree.unlock(locked.pop(dice.randrange(len(locked))))
        elif kind == 4:
            tree.evict(dice.randint(1, 3))
        elif kind == 5 and (node := tree.end_of(array("q", [dice.randrange(3) for _ in range(2)]), CHUNK)):
            tree.discard(node)
        held = {node for node in locked if not node.is_root}
        assert num_lost(tree) == 0 and states.num_locked == len(held)
        assert all(node.slots is not None and states.has(node) for node in held)
    while locked:
        tree.unlock(locked.pop())
    tree.evict(1000)
    assert states.pool.available_size() == states.pool.size and len(tree.allocator.left) == 999

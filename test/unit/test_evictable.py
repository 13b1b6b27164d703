"""What can be evicted, against a list that is sorted anew at every eviction."""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_lazy.cache import eviction
from sglang_lazy.cache.eviction import Evictable


@dataclasses.dataclass(eq=False)
class Leaf:
    id: int
    priority: int


def heap_of(*leaves):
    heap = Evictable(lambda leaf: leaf.priority)
    for leaf in leaves:
        heap.add(leaf)
    return heap


class EvictionOrder(RuleBasedStateMachine):
    """Leaves appear, gain value, stop being evictable and return; `pop` always yields the least valuable."""

    def __init__(self):
        super().__init__()
        self.heap = heap_of()
        self.leaves = []
        self.evictable = set()

    @rule(priority=st.integers(0, 5))
    def add(self, priority):
        self.leaves.append(Leaf(len(self.leaves), priority))
        self.enter(len(self.leaves) - 1)

    @precondition(lambda self: self.leaves)
    @rule(pick=st.integers(0), growth=st.integers(1, 4))
    def grow(self, pick, growth):
        self.leaves[pick % len(self.leaves)].priority += growth

    @precondition(lambda self: self.evictable)
    @rule(pick=st.integers(0))
    def leave(self, pick):
        """A leaf gets a lock or a child."""
        leaf = sorted(self.evictable, key=lambda leaf: leaf.id)[pick % len(self.evictable)]
        self.evictable.remove(leaf)
        self.heap.discard(leaf)

    @precondition(lambda self: self.leaves)
    @rule(pick=st.integers(0))
    def enter(self, pick):
        leaf = self.leaves[pick % len(self.leaves)]
        self.evictable.add(leaf)
        self.heap.add(leaf)

    @rule()
    def pop(self):
        expected = min(self.evictable, key=lambda leaf: (leaf.priority, leaf.id), default=None)
        assert self.heap.pop() is expected
        self.evictable.discard(expected)

    @invariant()
    def holds_each_leaf_once(self):
        """Stale entries do not pile up, and no evictable leaf is lost."""
        members = [node.id for _, _, node in self.heap._heap]
        assert len(members) == len(set(members)) <= len(self.leaves)
        assert {leaf.id for leaf in self.evictable} <= set(members) == self.heap._entered
        assert self.heap.nodes == self.evictable and len(self.heap) == len(self.evictable)
        assert all((leaf in self.heap) == (leaf in self.evictable) for leaf in self.leaves)

    def teardown(self):
        order = sorted(self.evictable, key=lambda leaf: (leaf.priority, leaf.id))
        for leaf in order:
            assert self.heap.pop() is leaf
        assert self.heap.pop() is None


EvictionOrder.TestCase.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, stateful_step_count=40
)
TestEvictionOrder = EvictionOrder.TestCase


def test_equal_priorities_leave_in_order_of_id():
    """Ties must not depend on the order in which leaves came, which differs between ranks."""
    heap = heap_of(*(Leaf(id, 1) for id in (3, 1, 2)))
    assert [heap.pop().id for _ in range(3)] == [1, 2, 3]


def test_leaf_comes_back_at_its_current_priority():
    """A leaf dropped while it was not evictable returns with its priority of that moment."""
    first, second = Leaf(1, 1), Leaf(2, 2)
    heap = heap_of(first, second)
    heap.discard(first)
    assert heap.pop() is second
    first.priority = 9
    heap.add(first)
    heap.add(second)
    assert heap.pop() is second
    assert heap.pop() is first
    assert heap.pop() is None


def test_leaves_that_are_gone_do_not_stay(monkeypatch):
    """Nothing is evicted, but leaves are deleted: the heap has no more than are left, and a few others."""
    monkeypatch.setattr(eviction, "SLACK", 3)
    heap = heap_of()
    for number in range(100):
        leaf = Leaf(number, number)
        heap.add(leaf)
        if number >= 5:
            heap.discard(leaf)
    assert len(heap._heap) == len(heap._entered) <= 2 * 5 + 3
    assert [heap.pop().id for _ in range(5)] == [0, 1, 2, 3, 4] and heap.pop() is None

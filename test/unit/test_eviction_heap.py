"""The eviction heap against a list that is sorted anew at every eviction."""

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_lazy.cache import eviction
from sglang_lazy.cache.eviction import EvictionHeap


@dataclasses.dataclass(eq=False)
class Leaf:
    id: int
    priority: int


def heap_of(*leaves):
    heap = EvictionHeap(lambda leaf: leaf.priority)
    for leaf in leaves:
        heap.push(leaf, leaves)
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
        """A leaf gets a lock or a child; the heap is not told."""
        self.evictable.remove(sorted(self.evictable, key=lambda leaf: leaf.id)[pick % len(self.evictable)])

    @precondition(lambda self: self.leaves)
    @rule(pick=st.integers(0))
    def enter(self, pick):
        leaf = self.leaves[pick % len(self.leaves)]
        self.evictable.add(leaf)
        self.heap.push(leaf, self.evictable)

    @rule()
    def pop(self):
        expected = min(self.evictable, key=lambda leaf: (leaf.priority, leaf.id), default=None)
        assert self.heap.pop(self.evictable) is expected
        self.evictable.discard(expected)

    @invariant()
    def holds_each_leaf_once(self):
        """Stale entries do not pile up, and no evictable leaf is lost."""
        members = [node.id for _, _, node in self.heap._heap]
        assert len(members) == len(set(members)) <= len(self.leaves)
        assert {leaf.id for leaf in self.evictable} <= set(members) == self.heap._members

    def teardown(self):
        order = sorted(self.evictable, key=lambda leaf: (leaf.priority, leaf.id))
        for leaf in order:
            assert self.heap.pop(self.evictable) is leaf
            self.evictable.remove(leaf)
        assert self.heap.pop(self.evictable) is None


EvictionOrder.TestCase.settings = settings(
    derandomize=True, deadline=None, database=None, max_examples=100, stateful_step_count=40
)
TestEvictionOrder = EvictionOrder.TestCase


def test_equal_priorities_leave_in_order_of_id():
    """Ties must not depend on the order of pushes, which differs between ranks."""
    leaves = [Leaf(id, 1) for id in (3, 1, 2)]
    heap = heap_of(*leaves)
    assert [heap.pop(set(leaves)).id for _ in leaves] == [1, 2, 3]


def test_leaf_comes_back_at_its_current_priority():
    """A leaf dropped while it was not evictable returns with its priority of that moment."""
    first, second = Leaf(1, 1), Leaf(2, 2)
    heap = heap_of(first, second)
    assert heap.pop({second}) is second
    first.priority = 9
    heap.push(first, {first, second})
    heap.push(second, {first, second})
    assert heap.pop({first, second}) is second
    assert heap.pop({first}) is first
    assert heap.pop({first}) is None


def test_leaves_that_are_gone_do_not_stay(monkeypatch):
    """Nothing is evicted, but leaves are deleted: the heap has no more than are left, and a few others."""
    monkeypatch.setattr(eviction, "SLACK", 3)
    heap, evictable = heap_of(), set()
    for number in range(100):
        leaf = Leaf(number, number)
        evictable.add(leaf)
        heap.push(leaf, evictable)
        if number >= 5:
            evictable.remove(leaf)
    assert len(heap._heap) == len(heap._members) <= 2 * 5 + 3
    assert [heap.pop(evictable).id for _ in range(5)] == [0, 1, 2, 3, 4] and heap.pop(evictable) is None

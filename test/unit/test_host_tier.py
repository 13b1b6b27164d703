"""The host tier over a tree: what is copied and when, what a full host gives up, and that no KV is lost or mixed up.

Copies are as late as a GPU allows, and their targets are poison until then.
"""

import random
from array import array

import pytest
import torch

from fakes.host_tree import CHUNKS, Tree, check, host_used
from sglang_lazy.cache.numbers import Numbers
from sglang_lazy.core.keys import Namespace

TEXT = Namespace("text", None, None, b"path")
A, B, C, D = ([n, n + 1, n + 2, n + 3] for n in (10, 20, 30, 40))


def settle(tree):
    """Let copies end without waiting for them."""
    while tree.host.is_copying:
        tree.host.poll()


def warm(tree, *texts, namespace=CHUNKS):
    """Compute and copy; returns the nodes."""
    nodes = [tree.compute(tokens, namespace) for tokens in texts]
    tree.host.back_up(nodes)
    settle(tree)
    return nodes


def demote(tree):
    tree.evict(tree.num_evictable)


def test_chunks_are_copied_together_and_come_back_in_one_go():
    tree = Tree(40, 80)
    copied, loaded = [], []
    back_up, load = tree.transfers.back_up, tree.transfers.load
    tree.transfers.back_up = lambda pieces, _: copied.append(sum(len(each.host) for each in pieces)) or back_up(pieces)
    tree.transfers.load = lambda pieces, _: loaded.append(sum(len(each.host) for each in pieces)) or load(pieces)
    nodes = warm(tree, A, B, C)
    assert copied == [12] and host_used(tree) == 12
    demote(tree)
    assert all(node.slots is None for node in nodes) and tree.allocator.available_size() == 40
    assert tree.host.load(nodes) and all(tree.host.loading(node) for node in nodes) and loaded == [12]
    assert all(node.locks == 1 for node in nodes)
    check(tree)
    settle(tree)
    assert not any(tree.host.loading(node) or node.locks for node in nodes)
    check(tree)


def test_a_copy_under_way_is_not_evicted_and_not_complete():
    tree = Tree(20, 80)
    node = tree.compute(A)
    tree.host.back_up([node])
    assert tree.num_evictable == 0 and not tree.host.is_complete(node) and tree.host.is_copying
    assert ("copied", node) not in tree.events
    settle(tree)
    assert tree.num_evictable == 4 and tree.host.is_complete(node) and tree.events[-1] == ("copied", node)
    check(tree)


def test_an_eviction_that_falls_short_may_wait_for_copies():
    tree = Tree(20, 80)
    tree.host.back_up([tree.compute(A), tree.compute(B)])
    assert tree.num_evictable == 0 and tree.evict(8) == 0
    tree.host.finish()
    assert tree.evict(8) == 8
    check(tree)


def test_ends_are_copied_with_their_beginnings():
    tree = Tree(40, 80)
    tree.compute(A[:2])
    end = tree.compute(A)
    tree.host.back_up([end])
    settle(tree)
    assert host_used(tree) == 4 and end.parent.host is not None
    check(tree)
    demote(tree)
    assert tree.host.load([end]) and end.parent.slots is not None, "and loaded with them"
    settle(tree)
    check(tree)


def test_nodes_split_while_they_are_copied():
    tree = Tree(40, 80)
    end = tree.compute(A)
    tree.host.back_up([end])
    above = tree.end_of(array("q", A[:2]), CHUNKS)
    check(tree)
    settle(tree)
    assert above.host.transfer is None and not above.locks
    check(tree)
    demote(tree)
    tree.host.load([end])
    further = tree.end_of(array("q", A[:3]), CHUNKS)
    assert tree.host.loading(further) and tree.host.loading(above)
    settle(tree)
    assert not tree.host.loading(further)
    check(tree)
    tree.compute(B)
    tree.use(end)
    tree.host.evict(4)
    check(tree)
    assert host_used(tree) == 0 and end.slots is not None, "the new nodes' copies can be given up, too"


def test_text_is_not_copied():
    tree = Tree(40, 80)
    warm(tree, A, namespace=TEXT)
    warm(tree, [1, 2], namespace="leading text")
    assert host_used(tree) == 0


def test_write_through_selective_copies_what_is_used_twice():
    tree = Tree(40, 80, min_hits=2)
    warm(tree, A, B)
    assert host_used(tree) == 0
    warm(tree, B)
    assert host_used(tree) == 4
    check(tree)


def test_a_full_host_gives_up_what_was_used_least_recently():
    """Of what only the host has: room for three chunks."""
    tree = Tree(40, 12)
    a, b, c = warm(tree, A, B, C)
    demote(tree)
    assert tree.host.load([a])
    settle(tree)
    tree.use(a)
    demote(tree)
    (d,) = warm(tree, D)
    assert b not in tree.nodes() and b.host is None
    assert all(node.host is not None for node in (a, c, d))
    check(tree)


def test_a_full_host_first_gives_up_copies_of_what_came_last():
    tree = Tree(40, 12)
    a, _, c, d = warm(tree, A, B, C, D)
    assert c.host is not None and d.host is None, "nothing to give up while the copies are made"
    (e,) = warm(tree, [50, 51, 52, 53])
    assert e.host is not None and c.host is None and c.slots is not None and a.host is not None
    assert ("gave up", 4) in tree.events and ("removed", c) in tree.events
    check(tree)


def test_what_lost_its_copy_is_copied_again_before_it_leaves():
    """Cycling through more chunks than either tier holds: device and host hold different ones."""
    tree = Tree(24 * 4, 24 * 4)
    chunks = [[i, i // 6 + 100, i % 6 + 100, 3] for i in range(1, 37)]
    found = []
    for turn in range(4):
        for tokens in chunks:
            node = tree.end_of(array("q", tokens), CHUNKS)
            known = node is not None
            if known:
                if node.slots is None:
                    assert tree.host.load([node])
                    settle(tree)
                tree.use(node)
            else:
                node = tree.compute(tokens)
            tree.host.back_up([node])
            settle(tree)
            check(tree)
            if turn > 1:
                found.append(known)
    assert all(found)


def test_copies_that_are_made_or_read_are_not_given_up():
    tree = Tree(60, 8)
    nodes = [tree.compute(A), tree.compute(B)]
    tree.host.back_up(nodes)
    tree.host.evict(8)
    assert host_used(tree) == 8, "they are being made"
    settle(tree)
    demote(tree)
    tree.host.load(nodes)
    tree.host.evict(8)
    assert host_used(tree) == 8, "they are being loaded"
    settle(tree)
    tree.host.protect(nodes[0])
    tree.host.evict(8)
    assert host_used(tree) == 4 and nodes[0].host is not None, "it is being stored"
    tree.host.release(nodes[0])
    tree.host.evict(8)
    assert host_used(tree) == 0
    check(tree)


def test_what_is_protected_keeps_its_beginning_on_the_host():
    tree = Tree(40, 8)
    (end,) = warm(tree, A)
    tree.host.protect(end)
    above = tree.end_of(array("q", A[:2]), CHUNKS)
    demote(tree)
    tree.host.evict(8)
    assert above.host is not None and end.host is not None
    assert tree.on_host(tree.host.slots_to(end)) == [x + y for x, y in zip(tree.kv(above), tree.kv(end), strict=True)]
    tree.host.release(end)
    tree.host.evict(3)
    assert host_used(tree) == 0 and not tree.nodes()


def test_a_load_evicts_no_more_than_it_lacks():
    tree = Tree(12, 80)
    a, b = warm(tree, A, [*B, 99])
    demote(tree)
    c = tree.compute(C)
    tree.lock(c)
    tree.compute([1, 2, 3])
    tree.compute([4, 5, 6])
    assert tree.allocator.available_size() == 2
    assert tree.host.load([a])
    assert tree.allocator.available_size() == 1 and len(tree.nodes()) == 4, "one text has left"
    settle(tree)
    tree.lock(a)
    assert not tree.host.load([b]) and b.slots is None and tree.num_evictable == 3, "nothing is evicted in vain"
    check(tree)


def test_a_load_keeps_what_stands_before_it():
    """The beginning is on the device; making room must not evict it."""
    tree = Tree(6, 80)
    tree.compute(A[:2])
    (end,) = warm(tree, A)
    tree.evict_leaf(end)
    tree.compute([1, 2])
    assert tree.allocator.available_size() == 2
    other = tree.compute([3, 4])
    tree.use(other)
    assert tree.host.load([end]) and end.parent.slots is not None and other.slots is not None
    settle(tree)
    check(tree)


def test_what_stands_before_a_load_does_not_count_as_room():
    """Only the beginning could be evicted, and the end is of no use without it; waiting requests keep their locks."""
    tree = Tree(8, 80)
    tree.compute(A[:2])
    (end,) = warm(tree, A)
    tree.evict_leaf(end)
    tree.lock(tree.compute([1, 2, 3, 4, 5]))
    tree.release_lock = lambda: pytest.fail("a lock was revoked")
    assert tree.num_evictable == 2 and tree.allocator.available_size() == 1
    assert not tree.host.load([end]) and end.slots is None and end.parent.slots is not None
    check(tree)


def test_a_load_takes_the_slots_of_what_it_evicts():
    """The CPU knows these, whether they were computed, loaded or split, and can copy their runs by the copy engine."""
    tree = Tree(12, 80)
    (a,) = warm(tree, A)
    b, c, d = warm(tree, B, C, D)
    assert a.slots is None and tree.allocator.available_size() == 0
    loaded, load = [], tree.transfers.load
    tree.transfers.load = lambda pieces, _: loaded.append(pieces) or load(pieces)
    tree.end_of(array("q", B[:1]), CHUNKS)
    left = [*tree.slots_to(b)][::-1]  # the end leaves before its beginning
    assert tree.host.load([a])
    ((piece,),) = loaded
    assert torch.equal(piece.device, torch.cat(left)) and torch.equal(piece.known, piece.device)
    settle(tree)
    check(tree)
    loaded.clear()
    tree.evict_leaf(d)
    tree.compute([1, 2])
    tree.use(a, 0)
    tree.use(c, 0)
    assert tree.host.load([b])
    known, unknown = loaded[0]
    assert len(known.known) == 2 and len(unknown.device) == 2 and unknown.known is None
    settle(tree)
    check(tree)


def test_a_load_gives_up_if_eviction_falls_short():
    tree = Tree(8, 80)
    (a,) = warm(tree, A)
    demote(tree)
    for tokens in ([1], [2], [3], B):
        tree.compute(tokens)
    tree.host._device.take = lambda num_tokens: tree.take(1)
    assert not tree.host.load([a]) and a.slots is None and tree.allocator.available_size() == 2
    check(tree)


def test_fetched_chunks_are_adopted_below_what_the_host_has():
    tree = Tree(40, 80)
    (a,) = warm(tree, A)
    fetched = [*A[:2], 7, 8]
    slots = tree.host.alloc(4)
    computed = Tree(40, 80)
    (same,) = warm(computed, fetched)
    tree.memory.groups[0].host[:, slots] = computed.memory.groups[0].host[:, computed.host.slots_to(same)]
    node = tree.host.adopt(array("q", fetched), CHUNKS, slots)
    assert node.tokens.tolist() == [7, 8] and node.slots is None and host_used(tree) == 6
    check(tree)
    again = tree.host.alloc(4)
    assert tree.host.adopt(array("q", fetched), CHUNKS, again) is node and host_used(tree) == 6
    demote(tree)
    assert a.host is not None and tree.host.load([node])
    settle(tree)
    check(tree)


def test_what_begins_without_a_copy_is_not_adopted():
    tree = Tree(40, 80)
    tree.compute(A)
    slots = tree.host.alloc(4)
    assert tree.host.adopt(array("q", [*A[:2], 7, 8]), CHUNKS, slots) is None
    check(tree, held=[slots])
    tree.host.free(slots)
    check(tree)


def test_ranks_take_note_of_what_has_ended_on_all():
    asked = []
    tree = Tree(40, 80, agree=lambda ended: asked.append(ended) or [0, 0])
    tree.host.poll()
    node = tree.compute(A)
    tree.host.back_up([node])
    while [1, 0] not in asked:
        tree.host.poll()
    assert tree.host.is_copying and node.locks == 1, "it has ended here, but not on another rank"
    tree.host.finish()
    assert not node.locks
    num_asked = len(asked)
    tree.host.poll()
    assert len(asked) == num_asked, "nothing is under way"


def test_a_reset_frees_the_host():
    tree = Tree(40, 80)
    warm(tree, A)
    tree.host.back_up([tree.compute(B)])
    tree.host.reset()
    assert host_used(tree) == 0 and not tree.host.is_copying


class Unknown:
    """An event that does not come in time."""

    def query(self):
        return False


@pytest.mark.parametrize("has_states", [False, True], ids=["KV", "states"])
@pytest.mark.parametrize("seed", range(6))
def test_histories(seed, has_states):
    """Any order of events, with tiny tiers: nothing is lost, mixed up or read before it has come."""
    dice = random.Random(seed)
    size, host_size, min_hits = dice.choice((16, 30, 60)), dice.choice((8, 24, 50)), dice.choice((0, 2))
    num_states = dice.choice((size, size // 2)) if has_states else 0
    tree = Tree(size, host_size, num_states, min_hits=min_hits)
    numbers = tree.transfers.numbers
    tree.transfers.numbers = lambda slots: Numbers(slots, Unknown()) if dice.random() < 0.2 else numbers(slots)
    texts = [[dice.randrange(3) for _ in range(dice.randrange(1, 9))] for _ in range(12)]
    protected, held = [], []

    def some():
        nodes = tree.nodes()
        return dice.sample(nodes, min(len(nodes), dice.randrange(1, 4)))

    def add():
        if (node := tree.compute(dice.choice(texts), dice.choice((CHUNKS, CHUNKS, TEXT)))) and dice.random() < 0.8:
            tree.host.back_up([node])

    def load():
        missing = [node for node in some() if node.slots is None]
        before = room()
        if missing and not tree.host.load(missing):
            assert before == room()

    def room():
        states = [] if tree.states is None else [tree.states.pool.available_size(), tree.states.num_evictable]
        return [tree.allocator.available_size(), tree.num_evictable, *states]

    def look():
        tree.find(array("q", dice.choice(texts)), CHUNKS)

    def protect():
        for node in some():
            if node.host is not None and tree.host.is_complete(node):
                tree.host.protect(node)
                protected.append((node, on_host(node)))

    def on_host(node):
        state = tree.state_on_host(node.host.state) if has_states else None
        return tree.on_host(tree.host.slots_to(node)), state

    def release():
        if protected:
            node, stored = protected.pop(dice.randrange(len(protected)))
            assert on_host(node) == stored
            tree.host.release(node)

    def discard():
        for node in some():
            idle = not (node.children or node.locks or tree.host.holds(node))
            assert tree.discard(node) == idle

    def fetch():
        tokens = array("q", dice.choice(texts))
        slots, state = tree.host.alloc(len(tokens)), tree.host.states.alloc() if has_states else None
        if slots is None or (has_states and state is None):
            held.append((torch.empty(0, dtype=torch.int64) if slots is None else slots, state))
            return free()
        rows = Tree(20, 20, 20 if has_states else 0)
        node = rows.compute(tokens.tolist())
        rows.host.back_up([node])
        rows.host.finish()
        tree.memory.groups[0].host[:, slots] = rows.memory.groups[0].host[:, rows.host.slots_to(node)]
        if has_states:
            for target, source in zip(tree.host.states.memory.groups, rows.host.states.memory.groups, strict=True):
                target.host[:, state] = source.host[:, node.host.state]
        if tree.host.adopt(tokens, CHUNKS, slots, state) is None:
            held.append((slots, state))

    def free():
        if held:
            slots, state = held.pop()
            tree.host.free(slots)
            if state is not None:
                tree.host.states.memory.slots.free(state)

    events = [add, add, add, load, load, look, protect, release, release, discard, fetch, free, tree.host.poll]
    events += [
        lambda: tree.evict(dice.randrange(1, 12)),
        lambda: tree.host.evict(dice.randrange(1, 6)),
        tree.host.finish,
    ]
    for _ in range(400):
        dice.choice(events)()
        check(tree, *([each for each in some if each is not None] for some in zip(*held, strict=True)))
    settle(tree)
    for node, _ in protected:
        tree.host.release(node)
    while held:
        free()
    tree.evict(tree.num_evictable)
    tree.host.evict(tree.memory.slots.size)
    check(tree)
    assert not tree.nodes() and torch.all(tree.memory.slots.alloc(tree.memory.slots.size).diff() == 1)


def ask(tree, tokens):
    """Serve a chunk from where it is; returns the tier that had it, None if none."""
    node = tree.end_of(array("q", tokens), CHUNKS)
    tier = None if node is None else "host" if node.slots is None else "device"
    if tier == "host":
        assert tree.host.load([node])
        settle(tree)
    node = tree.compute(tokens) if tier is None else node
    if tier is not None:
        tree.use(node, 0)
    tree.host.back_up([node])
    settle(tree)
    check(tree)
    return tier


def copied_chunks(tree):
    """How many chunks have a copy, and how many of these are on the device as well."""
    nodes = [node for node in tree.nodes() if node.host is not None]
    return len(nodes), sum(node.slots is not None for node in nodes)


def corpus(count):
    """Chunks that all differ in their first token."""
    return [[100 + i, *(1 + (i + j) % 7 for j in range(5))] for i in range(count)]


def test_without_pressure_everything_has_a_copy():
    tree, chunks = Tree(60, 240), corpus(30)
    for chunk in chunks * 2:
        ask(tree, chunk)
    assert copied_chunks(tree)[0] == 30


def test_full_tiers_share_little():
    """Twice as many chunks as the device holds, in random order: most copies are of chunks that the device lacks."""
    tree, chunks, dice = Tree(66, 60), corpus(19), random.Random(2)
    tiers = [ask(tree, chunks[dice.randrange(19)]) for _ in range(300)]
    copied, shared = copied_chunks(tree)
    assert copied == 10 and shared <= 3
    assert sum(tier is None for tier in tiers[100:]) <= 20, "nearly all are found, since the tiers have room for 20"


def test_hot_chunks_are_not_copied_again_to_a_full_host():
    """A chunk in constant use is copied once or twice, not at each use."""
    tree, (hot, *others) = Tree(68, 60), corpus(18)
    for chunk in others * 3:
        ask(tree, chunk)
        assert ask(tree, hot) in ("device", None)
    stored = [what for name, what in tree.events if name == "stored" and what.tokens.tolist() == hot]
    assert 1 <= len(stored) <= 2


def test_a_beginning_keeps_its_copy_while_an_end_has_one():
    """Chunks that share a prefix: the host never holds an end without its beginning, which `check` sees to."""
    tree, dice = Tree(60, 40), random.Random(1)
    chunks = [[first, 2, 3, last, last, last] for first in (7, 8, 9) for last in (4, 5, 6, 10, 11)]
    for _ in range(200):
        ask(tree, chunks[dice.randrange(len(chunks))])

"""Invariants of the cache and of running requests, which hold after every step."""

import collections
import itertools
from collections.abc import Iterable
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from fakes import windows
from fakes.pools import NUM_ROTATIONS
from fakes.requests import positions_of
from fakes.slots import NOT_COMPUTED
from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.store import PRIVATE_SEGMENT
from sglang_lazy.core.keys import as_int32, chunk_key
from sglang_lazy.core.state import RowNodes, fill_of, linked

Held = list[tuple[Node, int]]
"""Nodes of our tree that somebody holds, each with the spread of its lock."""


def check(pools: Any, holders: Iterable[Req]) -> None:
    """All of them.  holders: waiting requests that have chunks locked."""
    check_slots(pools)
    held = check_locks(pools, holders)
    check_plain_locks(pools)
    if pools.window:
        windows.check_slots(pools)
        windows.check_locks(pools, held)
    check_tree_contents(pools)
    check_row_contents(pools)
    check_segments(pools)
    if pools.cache.store.states is not None:
        check_states(pools)


def check_slots(pools: Any) -> None:
    """Every slot is free, in exactly one node of either tree, or owned by one running request."""
    whole = pools.slots.full_attn_allocator if pools.window else pools.slots
    places = [*whole.free_pages.tolist(), *whole.release_pages.tolist()]
    for node, _, _ in pools.nodes():
        assert node.slots is None or len(node.slots) == len(node)
        places += [] if node.slots is None else node.slots.tolist()
    for node, *_ in pools.plain_nodes():
        value = node.component_data[ComponentType.FULL].value
        assert len(value) == len(node.key)
        places += value.tolist()
    for req in pools.running:
        row = pools.rows.req_to_token[req.kv.req_pool_idx]
        places += row[req.kv.cache_protected_len : req.kv.kv_committed_len].tolist()
        if (fill := fill_of(req)) is not None and fill.published:
            places += fill.duplicates.tolist()
        if (state := linked(req)) is not None and state.own is not None:
            places += state.own.slots.tolist()
    assert sorted(places) == list(range(1, whole.size + 1))
    if pools.has_tiers:
        check_host_slots(pools)


def check_host_slots(pools: Any) -> None:
    """Every slot of the host is free or in one tree node; what is above a copy has one, and the same of slots."""
    tiers = pools.cache.tiers
    free = tiers.host.memory.slots
    places = [slot for extent in zip(free._starts, free._ends, strict=True) for slot in range(*map(int, extent))]
    assert len(places) == free.num_free
    if tiers.storage is not None:
        places += [slot for fetch in tiers.storage.fetches for slot in fetch.slots.tolist()]
    leaves = set()
    for node, _, _ in pools.nodes():
        assert node.slots is not None or node.host is not None, "a node without KV is in the tree"
        assert node.parent.is_root or node.slots is None or node.parent.slots is not None
        assert node.parent.is_root or node.host is None or node.parent.host is not None
        if node.host is not None:
            assert len(node.host.slots) == len(node)
            places += node.host.slots.tolist()
        if node.slots is None and not node.children:
            leaves.add(node)
    assert sorted(places) == list(range(free.size))
    assert tiers.host._leaves.nodes == leaves


def check_locks(pools: Any, holders: Iterable[Req]) -> Held:
    """A node is locked once by each user at or below it; the sizes and the leaves say what the locks say. Returns
    the nodes that are held.

    The chunks of a request are one user, whether it is admitted, runs, or both.
    """
    tree, users = pools.cache.tree, collections.Counter()
    rows = [req.last_node for req in pools.running if isinstance(req.last_node, RowNodes)]
    assert all(row.num_locks == 1 for row in rows)
    held = [pair for row in rows for pair in zip(row.spans, row.spreads or itertools.repeat(0), strict=False)]
    for chunks, num_locks in collections.Counter(
        [row.chunks for row in rows] + [linked(req).chunks for req in holders]
    ).items():
        assert chunks.num_locks == num_locks
        held += chunks.found
    if pools.has_tiers:
        host = pools.cache.tiers.host
        held += [(node, 0) for some in host._under_way for transfer in some for node in transfer.ends]
    if pools.cache.admission is not None:
        held += [(chunk.node, 0) for chunk in pools.cache.admission.pins._chunks.values()]
    held += [(node, 0) for node in pools.waiting_locks]
    assert tree.num_locks == sum(not node.is_root for node, _ in held)
    for node, _ in held:
        users.update(node.path())
    evictable = locked = 0
    leaves = set()
    for node, _, _ in pools.nodes():
        assert node.locks == users.pop(node, 0)
        assert node.num_below == sum(child.slots is not None for child in node.children.values())
        if node.locks:
            locked += len(node)
        elif node.slots is not None:
            evictable += len(node)
            if not node.num_below:
                leaves.add(node)
    assert not users, "a request holds nodes that left the tree"
    assert (tree.num_evictable, tree.num_locked) == (evictable, locked)
    assert tree._leaves.nodes == leaves
    return held


def check_plain_locks(pools: Any) -> None:
    """The same of SGLang's own tree, which only running plain requests lock; and what SGLang is told of both trees."""
    cache, core, users = pools.cache, pools.cache.plain.tree_core, collections.Counter()
    for req in pools.running:
        if not isinstance(req.last_node, RowNodes):
            node = core.node_by_id(req.lock.node)
            while node is not core.root_node:
                users[node] += 1
                node = node.parent
    sizes = collections.Counter()
    for node, *_ in pools.plain_nodes():
        data = node.component_data[ComponentType.FULL]
        assert data.lock_ref == users.pop(node, 0)
        sizes[data.lock_ref > 0] += len(node.key)
    assert not users, "a request holds nodes that left SGLang's tree"
    assert cache.evictable_size() == cache.full_evictable_size() == cache.tree.num_evictable + sizes[False]
    assert cache.protected_size() == cache.full_protected_size() == cache.tree.num_locked + sizes[True]


def check_tree_contents(pools: Any) -> None:
    """The slots of a node hold what its tokens and namespace promise to whoever finds it; chunks are found there."""
    ends = {}
    for node, namespace, before in pools.nodes():
        tokens = before + tuple(node.tokens)
        ends[chunk_key(as_int32(tokens), namespace)] = node
        promises = [pools.promise(namespace, tokens[: i + 1]) for i in range(len(before), len(tokens))]
        if node.slots is not None:
            contents = [pools.slots.contents[slot] for slot in node.slots.tolist()]
            assert contents == promises or (set(contents) == {NOT_COMPUTED} and pools.cache.tiers.host.loading(node))
        if node.host is not None:
            copies = [pools.cache.tiers.host.memory.slots.contents[slot] for slot in node.host.slots.tolist()]
            being_made = node.host.transfer is not None and not node.host.transfer.loads
            assert copies == promises or (set(copies) == {NOT_COMPUTED} and being_made)
    for node, extra_key, cache_salt, before in pools.plain_nodes():
        tokens, slots = before + tuple(node.key), node.component_data[ComponentType.FULL].value.tolist()
        promises = [
            pools.plain_promise(extra_key, cache_salt, tokens[: len(before) + i + 1]) for i in range(len(slots))
        ]
        assert [pools.slots.contents[slot] for slot in slots] == promises
    for key, chunk in pools.cache.store._cached.items():
        assert ends[key] is chunk.node


def check_row_contents(pools: Any) -> None:
    """Every entry of a running request's row holds what its position demands."""
    for req in pools.running:
        row = pools.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len].tolist()
        positions = positions_of(req, 0, req.kv.kv_committed_len)
        assert [pools.slots.contents.get(slot) for slot in row] == [req.contents[p] for p in positions]


def check_segments(pools: Any) -> None:
    """Segments say where the keys of the row's beginning were rotated to; those of one id list the same slots."""
    table, slots_by_id = pools.rows.segment_table, {}
    for req in pools.running:
        state, index = linked(req), req.kv.req_pool_idx
        count = int(table.num_segments[index])
        if state is None or not state.policy.in_place or state.recomputes:
            assert count == 0
            continue
        columns = (table.ends, table.offsets, table.ids)
        segments = list(zip(*(column[index, :count].tolist() for column in columns), strict=True))
        start, row = 0, pools.rows.req_to_token[index].tolist()
        for (end, offset, segment_id), chunk in zip(segments, state.prompt.chunks, strict=True):
            kept = [i for first, last in chunk.kept for i in range(first, last)]
            positions = positions_of(req, start, end)
            assert positions == [chunk.start + i for i in kept]
            rotated_to = [sum(map(len, req.contents[position][3])) - 1 for position in positions]
            assert [(offset + i) % NUM_ROTATIONS for i in rotated_to] == positions, "where each key was rotated to"
            if segment_id != PRIVATE_SEGMENT:
                assert slots_by_id.setdefault(segment_id, row[start:end]) == row[start:end]
            start = end
        assert start == state.prompt.num_chunk_tokens


def check_states(pools: Any) -> None:
    """Every state is free, of exactly one node, or of a fill; that of a node has gone through its tokens, in the order
    of the prompts that find it; and what is told of all agrees."""
    states, layers = pools.cache.store.states, pools.rows.segment_table.recurrent
    slots, texts, unlocked, locked = [*states.pool._free], set(), set(), 0
    for req in pools.running:
        slots += [] if (fill := fill_of(req)) is None else fill.own_states
    for node, namespace, before in pools.nodes():
        if node.state is None:
            continue
        assert node.state.locks or node.state.slot is not None, "nobody needs it"
        if node.state.slot is None:
            continue
        slots.append(node.state.slot)
        locked += node.state.locks > 0
        if not node.state.locks:
            unlocked.add(node)
        if namespace.kind != "chunk":
            texts.add(node)
        if pools.has_tiers and pools.cache.tiers.host.loading(node):
            continue
        tokens = before + tuple(node.tokens)
        if namespace.kind == "chunk":
            promise = tuple(pools.promise(namespace, tokens[: i + 1])[3] for i in range(len(tokens)))
        else:
            promise = pools.promise(namespace, tokens)[3]
        assert layers.path(node.state.slot) == promise
    assert sorted(slots) == list(range(1, states.pool.size + 1))
    assert states._unlocked.nodes == unlocked and states.num_locked == locked and states._texts == texts

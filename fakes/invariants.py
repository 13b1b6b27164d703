"""Invariants of the cache and of running requests, which hold after every step."""

import collections
import itertools
from array import array
from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import TreeNode

from fakes import windows
from fakes.pools import NUM_ROTATIONS
from fakes.requests import positions_of
from fakes.slots import NOT_COMPUTED
from sglang_lazy.chunks.store import PRIVATE_SEGMENT
from sglang_lazy.core.keys import tokens_digest
from sglang_lazy.core.state import RowNodes, fill_of, linked


def check(pools: Any, holders: Iterable[Req]) -> None:
    """All of them.  holders: waiting requests that have chunks locked."""
    check_slots(pools)
    held = check_locks(pools, holders)
    if pools.window:
        windows.check_slots(pools)
        windows.check_locks(pools, held)
    check_tree_contents(pools)
    check_row_contents(pools)
    check_segments(pools)


def check_slots(pools: Any) -> None:
    """Every slot is free, in exactly one tree node, or owned by one running request."""
    whole = pools.slots.full_attn_allocator if pools.window else pools.slots
    places = [*whole.free_pages.tolist(), *whole.release_pages.tolist()]
    for node, _, _ in pools.nodes():
        assert node.evicted or len(node.value) == len(node.key)
        places += [] if node.evicted else node.value.tolist()
    for req in pools.running:
        row = pools.rows.req_to_token[req.req_pool_idx]
        places += row[req.cache_protected_len : req.kv_committed_len].tolist()
        if (fill := fill_of(req)) is not None and fill.published:
            places += fill.duplicates.tolist()
        if (state := linked(req)) is not None and state.own is not None:
            places += state.own.slots.tolist()
    assert sorted(places) == list(range(1, whole.size + 1))
    if pools.has_tiers:
        check_host_slots(pools)


def check_host_slots(pools: Any) -> None:
    """Every slot of the host is free or in one tree node; what is above a copy has one, and the same of slots."""
    pool, root = pools.cache.token_to_kv_pool_host, pools.cache.root_node
    places = torch.cat([pool.free_slots, *pool.release_slots]).tolist()
    places += [slot for fetch in pools.cache.fetches for slot in fetch.slots.tolist()]
    leaves = set()
    for node, _, _ in pools.nodes():
        assert not (node.evicted and not node.backuped), "a node without KV is in the tree"
        assert node.parent is root or node.evicted or not node.parent.evicted
        assert node.parent is root or node.parent.backuped or not node.backuped
        if node.backuped:
            assert len(node.host_value) == len(node.key)
            places += node.host_value.tolist()
        if node.evicted and not node.children:
            leaves.add(node)
    assert sorted(places) == list(range(pool.size))
    assert pools.cache.evictable_host_leaves == leaves


def check_locks(pools: Any, holders: Iterable[Req]) -> list[tuple[TreeNode, int]]:
    """A node is locked once by each user at or below it; the sizes and the leaves say what the locks say. Returns
    the nodes that are held, each with its spread.

    The chunks of a request are one user, whether it is admitted, runs, or both.
    """
    users = collections.Counter()
    rows = [req.last_node for req in pools.running if isinstance(req.last_node, RowNodes)]
    held = [(req.last_node, 0) for req in pools.running if not isinstance(req.last_node, RowNodes)]
    held += [pair for row in rows for pair in zip(row.spans, row.spreads or itertools.repeat(0), strict=False)]
    for chunks, num_locks in collections.Counter(
        [row.chunks for row in rows] + [linked(req).chunks for req in holders]
    ).items():
        assert chunks.num_locks == num_locks
        pairs = zip(chunks.nodes, chunks.spreads, strict=True)
        held += [(node, spread) for node, spread in pairs if node is not None]
    if pools.has_tiers:
        held += [(node, 0) for node in pools.cache.ongoing_load_back.values()]
        held += [(node, 0) for node, _, _ in pools.cache.ongoing_write_through.values()]
    if pools.cache.admission is not None:
        held += [(chunk.node, 0) for chunk in pools.cache.admission.pins._chunks.values()]
    held += [(node, 0) for node in pools.waiting_locks]
    assert pools.cache.num_locks == sum(node is not pools.cache.root_node for node, _ in held)
    for node, _ in held:
        while node is not pools.cache.root_node:
            users[node] += 1
            node = node.parent
    evictable = protected = 0
    leaves = set()
    for node, _, _ in pools.nodes():
        assert node.lock_ref == users.pop(node, 0)
        if node.lock_ref:
            protected += len(node.key)
        elif not node.evicted:
            evictable += len(node.key)
            if all(child.evicted for child in node.children.values()):
                leaves.add(node)
    assert not users, "a request holds nodes that left the tree"
    assert (pools.cache.evictable_size(), pools.cache.protected_size()) == (evictable, protected)
    assert pools.cache.evictable_leaves == leaves
    return held


def check_tree_contents(pools: Any) -> None:
    """The slots of a node hold what its key and namespace promise to whoever matches it; chunks are found there."""
    ends = {}
    for node, namespace, before in pools.nodes():
        tokens = before + tuple(node.key.token_ids)
        ends[namespace, tokens_digest(array("q", tokens))] = node
        promises = [pools.promise(namespace, tokens[: i + 1]) for i in range(len(before), len(tokens))]
        if not node.evicted:
            contents = [pools.slots.contents[slot] for slot in node.value.tolist()]
            assert all(pair[0] == pair[1] for pair in zip(contents, promises, strict=True)) or (
                set(contents) == {NOT_COMPUTED} and pools.cache.loading(node)
            )
        if node.backuped:
            copies = [pools.cache.token_to_kv_pool_host.contents[slot] for slot in node.host_value.tolist()]
            assert copies == promises or (set(copies) == {NOT_COMPUTED} and node.write_through_pending_id is not None)
    for key, chunk in pools.cache.store._cached.items():
        assert ends[key.namespace, key.tokens] is chunk.node


def check_row_contents(pools: Any) -> None:
    """Every entry of a running request's row holds what its position demands."""
    for req in pools.running:
        row = pools.rows.req_to_token[req.req_pool_idx, : req.kv_committed_len].tolist()
        positions = positions_of(req, 0, req.kv_committed_len)
        assert [pools.slots.contents.get(slot) for slot in row] == [req.contents[p] for p in positions]


def check_segments(pools: Any) -> None:
    """Segments say where the keys of the row's beginning were rotated to; those of one id list the same slots."""
    table, slots_by_id = pools.rows.segment_table, {}
    for req in pools.running:
        state, index = linked(req), req.req_pool_idx
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

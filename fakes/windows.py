"""Invariants of window KV: the KV of a layer with a window, if this layer has its own pool."""

import collections
import itertools
from typing import Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from fakes.attention import _path, _position
from fakes.requests import positions_of
from sglang_lazy.cache.node import Node
from sglang_lazy.core.state import fill_of


def check_slots(pools: Any) -> None:
    """Check that every slot of the second pool is free, in exactly one tree node, or owned by one running request, and
    that the slots of a node hold what its key promises."""
    slots = pools.slots
    pool = slots.swa_attn_allocator
    places = [*pool.free_pages.tolist(), *pool.release_pages.tolist()]
    for node, namespace, before in pools.nodes():
        of_node = [] if node.slots is None else slots.window_slots(node.slots.tolist())
        if node.window is None:
            assert not any(of_node), "window KV that is not counted"
            continue
        places += of_node
        tokens = before + tuple(node.tokens)
        promises = [pools.promise(namespace, tokens[: i + 1]) for i in range(len(before), len(tokens))]
        assert [slots.window_contents[slot] for slot in of_node] == promises
    for node, extra_key, cache_salt, before in pools.plain_nodes():
        of_node = slots.window_slots(node.component_data[ComponentType.FULL].value.tolist())
        if node.component_data[ComponentType.SWA].value is None:
            assert not any(of_node), "window KV that SGLang does not count"
            continue
        places += of_node
        tokens = before + tuple(node.key)
        promises = [
            pools.plain_promise(extra_key, cache_salt, tokens[: len(before) + i + 1]) for i in range(len(of_node))
        ]
        assert [slots.window_contents[slot] for slot in of_node] == promises
    for req in pools.running:
        row, kv = pools.rows.req_to_token[req.kv.req_pool_idx].tolist(), req.kv
        lost = kv.get_evicted_seqlen(ComponentType.SWA)
        assert not any(slots.window_slots(row[kv.cache_protected_len : lost]))
        own = row[max(kv.cache_protected_len, lost) : kv.kv_committed_len]
        if (fill := fill_of(req)) is not None and fill.published:
            own += [slot for slot in fill.duplicates.tolist() if slot not in fill.lent.tolist()]
        places += slots.window_slots(own)
    assert sorted(places) == list(range(1, slots.size_swa + 1))


def check_locks(pools: Any, held: list[tuple[Node, int]]) -> None:
    """Check that each holder of a node locks the last tokens up to it once, and that the sizes agree."""
    cache, users = pools.cache, collections.Counter()
    windows = cache.windows
    for node, spread in held:
        count = pools.window + spread
        while count > 0 and not node.is_root:
            assert len(node) <= count, "a lock ends within a node"
            users[node] += 1
            count -= len(node)
            node = node.parent
    sizes = collections.Counter()
    nodes = {node for node, _, _ in pools.nodes() if node.window is not None}
    assert set(users) <= nodes
    for node in nodes:
        assert node.window.locks == users[node]
        sizes[bool(users[node])] += len(node)
    assert (windows.num_evictable, windows.num_locked) == (sizes[False], sizes[True])
    assert windows._unlocked.nodes == {node for node in nodes if not users[node]}
    for data, length in ((node.component_data[ComponentType.SWA], len(node.key)) for node, *_ in pools.plain_nodes()):
        sizes[data.lock_ref > 0] += 0 if data.value is None else length
    assert (cache.swa_evictable_size(), cache.swa_protected_size()) == (sizes[False], sizes[True])
    for chunk in cache.store._cached.values():
        assert cache.tree.reads(chunk.node), "a cached chunk cannot be read"


def check_seen(pools: Any, batch: ScheduleBatch) -> None:
    """Check that what a batch's new tokens see in the layer with a window is still there."""
    for req in batch.reqs:
        end = req.kv.kv_committed_len
        start = req.prefix_len if batch.forward_mode.is_extend() else end - 1
        places = positions_of(req, 0, end)
        row = pools.rows.req_to_token[req.kv.req_pool_idx, :end].tolist()
        found = [pools.slots.window_contents.get(slot) for slot in pools.slots.window_slots(row)]
        for query, key in itertools.product(places[start:], range(end)):
            if _sees(req, query, places[key], pools.window):
                assert found[key] == req.contents[places[key]], "window KV that a query sees is missing"


def _sees(req: Req, query: int, key: int, window: int) -> bool:
    """Whether the token at `query` sees the one at `key` through a window. A fill's tokens see what they depend on."""
    if fill_of(req) is not None:
        path, other = _path(req.contents[query]), _path(req.contents[key])
        same = req.contents[query][0] == req.contents[key][0] or req.contents[key][0] == "text"
        if not same or path[: len(other)] != other:
            return False
    return 0 <= _position(req, query) - _position(req, key) <= window

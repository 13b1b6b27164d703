"""Create the cache of a server, with the trees and tiers that its model and flags need."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES
from sglang.srt.mem_cache.registry import default_radix_cache_factory
from sglang.srt.runtime_context import get_context, get_memory

from sglang_lazy.attention.table import table_of
from sglang_lazy.cache.node import ORDERS
from sglang_lazy.cache.room import OneTree, Pool, Room
from sglang_lazy.cache.states import States
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.cache.windows import Windows
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.cache.composite import CompositeCache
from sglang_lazy.port.cache.connect import connect_storage
from sglang_lazy.port.cache.plain import BlockEvents, HybridSlots, WindowSlots
from sglang_lazy.port.cache.tier_metrics import measured_host
from sglang_lazy.port.cache.tiers import Tiers
from sglang_lazy.port.comb.pool import chunk_pool_of
from sglang_lazy.port.facts import RequestFacts
from sglang_lazy.storage.report import HostReport


def new_cache(context: Any, runner: Any) -> CompositeCache:
    """The cache of a server.  context: SGLang's, for cache factories.  runner: a `ModelRunner` that reuses chunks."""
    params, pool = context.params, chunk_pool_of(runner)
    order, clock = ORDERS.get(params.eviction_policy, ORDERS["lru"]), itertools.count(1)
    slots = params.token_to_kv_pool_allocator
    share = LazyConfig.current().host_share
    with _host_share(1 - share), reserve_explained():
        on_gpu = torch.device(slots.device).type == "cuda"
        has_host = context.enable_hierarchical_cache and share < 1 and on_gpu
        plain = default_radix_cache_factory(dataclasses.replace(context, enable_hierarchical_cache=has_host))
    own: Any = HybridSlots(slots) if context.is_hybrid_swa else slots
    tree = RadixTree(own, order, clock)
    windows = Windows(tree, WindowSlots(slots, params.sliding_window_size)) if context.is_hybrid_swa else None
    tree.parts = () if windows is None else (windows,)
    table = table_of(params.req_to_token_pool)
    assert table is not None, "a server without chunk reuse has SGLang's cache"
    states = None
    if table.recurrent is not None:
        states = States(tree, table.recurrent.pool)
        tree.parts += (states,)
    cache = CompositeCache(plain, tree, clock, windows)
    trees: Room | OneTree = cache.room
    device = Pool(own, trees)
    if pool is None:
        store = ChunkStore(tree, device, windows, states)
        cache.rows = RowCache(store, params.req_to_token_pool, RequestFacts())
    else:
        of_chunks = RadixTree(pool.allocator, order, clock)
        trees = OneTree(of_chunks)
        store = ChunkStore(of_chunks, Pool(pool.allocator, trees))
        cache.rows = RowCache(store, params.req_to_token_pool, RequestFacts(), tree, device)
    if params.enable_kv_cache_events:
        cache.events = BlockEvents()
        tree.parts += (cache.events,)
    if context.enable_hierarchical_cache:
        pools = [slots.get_kvcache() if pool is None else pool.kv]
        if table.drafter is not None:
            pools.append(table.drafter.token_to_kv_pool)
        collector = plain.metrics_collector
        report = HostReport() if collector is None else measured_host(collector)
        of_states = None if table.recurrent is None else table.recurrent.pool
        cache.tiers = trees.copying = tiers = Tiers(store, pools, order, share, params, report, of_states)
        table.loads = tiers.transfers
        if cache.events is not None and pool is None:
            tiers.watchers.each.append(cache.events)
        if get_memory().hicache_storage_backend is not None:
            runners = [runner] if table.drafter is None else [runner, table.drafter]
            layout = None if of_states is None else of_states.layout
            tiers.connect(connect_storage(store, tiers.host, tiers.agree, runners, params.enable_metrics, layout))
    return cache


@contextlib.contextmanager
def _host_share(share: float) -> Iterator[None]:
    """A context in which SGLang's flags give this share of the host's memory, and no storage.

    SGLang's own storage would hold one object per token at page size 1, named by tokens only; ours is connected later.
    To a host laid out by pages the scheduler would copy token by token, 7 us each.
    """
    flags = get_memory()
    changed = {
        "hicache_storage_backend": None,
        "hicache_mem_layout": "layer_first",
        "hicache_size": flags.hicache_size * share,
        "hicache_ratio": flags.hicache_ratio * share,
    }
    before = {name: getattr(flags, name) for name in changed}
    get_context().override("sglang_lazy.host_share", **changed)
    try:
        yield
    finally:
        get_context().override("sglang_lazy.host_share", **before)


@contextlib.contextmanager
def reserve_explained() -> Iterator[None]:
    """A context in which SGLang's refusal of a host tier says how much memory it sets aside, and what to change."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("Not enough host memory"):
            raise
        raise ValueError(
            f"{error} Of the host's memory SGLang always leaves {HICACHE_HOST_MEMORY_RESERVE_BYTES / 2**30:.0f} GiB to "
            "other uses, and counts only what is free beyond: a host with less has no room for its tier. Lower "
            "--hicache-size (GB for each GPU) or --hicache-ratio; or give chunks all of it with --lazy-host-share 1: "
            "then SGLang has no tier of its own, and sets nothing aside."
        ) from error

"""Create the cache of a server, with the trees and tiers that its model and flags need."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES
from sglang.srt.mem_cache.registry import default_radix_cache_factory
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.observability.metrics_collector import RadixCacheMetricsCollector
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
from sglang_lazy.port.cache.plain import BlockEvents, HybridSlots, WindowSlots
from sglang_lazy.port.cache.storage import connect_storage
from sglang_lazy.port.comb.pool import chunk_pool_of
from sglang_lazy.port.facts import RequestFacts
from sglang_lazy.storage.report import HOST_COUNTERS, HostReport, counters_of
from sglang_lazy.storage.tiers import HostSize, Tiers, smallest_among

_MIN_HITS = {"write_through": 0, "write_through_selective": 2}
"""By SGLang's names: how often a chunk must have been used to be copied to the host."""


def new_cache(context: Any, runner: Any) -> CompositeCache:
    """The cache of a server.  context: SGLang's, for cache factories.  runner: a `ModelRunner` that reuses chunks."""
    params, pool = context.params, chunk_pool_of(runner)
    order, clock = ORDERS.get(params.eviction_policy, ORDERS["lru"]), itertools.count(1)
    slots = params.token_to_kv_pool_allocator
    share = LazyConfig.current().host_share
    table = table_of(params.req_to_token_pool)
    assert table is not None, "a server without chunk reuse has SGLang's cache"
    with _host_share(1 - share, "layer_first" if table.recurrent is None else "page_first"), reserve_explained():
        on_gpu = torch.device(slots.device).type == "cuda"
        has_host = context.enable_hierarchical_cache and share < 1 and on_gpu
        plain = default_radix_cache_factory(dataclasses.replace(context, enable_hierarchical_cache=has_host))
    own: Any = HybridSlots(slots) if context.is_hybrid_swa else slots
    tree = RadixTree(own, order, clock)
    windows = Windows(tree, WindowSlots(slots, params.sliding_window_size)) if context.is_hybrid_swa else None
    of_states = None if table.recurrent is None else table.recurrent.pool
    states = None if of_states is None else States(tree, of_states)
    tree.parts = tuple(part for part in (windows, states) if part is not None)
    cache = CompositeCache(plain, tree, clock, windows)
    trees: Room | OneTree = cache.room
    device = Pool(own, trees)
    if pool is None:
        store = ChunkStore(tree, device, windows, states)
    else:
        of_chunks = RadixTree(pool.allocator, order, clock)
        trees = OneTree(of_chunks)
        store = ChunkStore(of_chunks, Pool(pool.allocator, trees))
    cache.rows = RowCache(store, params.req_to_token_pool, RequestFacts(), tree, device)
    if table.drafter is not None and not isinstance(table.drafter.token_to_kv_pool, SWAKVPool):  # with slots elsewhere
        drafting = _buffers(table.drafter.token_to_kv_pool)
        store.draft_token_bytes = sum(buffer[0].nbytes for layer in drafting for buffer in layer)
    if params.enable_kv_cache_events:
        cache.events = BlockEvents()
        tree.parts += (cache.events,)
    if context.enable_hierarchical_cache:
        layers = _buffers(slots.get_kvcache() if pool is None else pool.kv)
        if table.drafter is not None:
            layers += _buffers(table.drafter.token_to_kv_pool)
        cache.tiers = trees.copying = tiers = Tiers(
            store,
            layers,
            order,
            HostSize(get_memory().hicache_size * 1e9 * share, get_memory().hicache_ratio * share),
            _MIN_HITS[get_memory().hicache_write_policy],
            smallest_among(params.tp_cache_group),
            HostReport() if plain.metrics_collector is None else measured_host(plain.metrics_collector),
        )
        table.loads = tiers.transfers
        if cache.events is not None and pool is None:
            tiers.host.watchers.append(cache.events)
        if get_memory().hicache_storage_backend is not None:
            runners = [runner] if table.drafter is None else [runner, table.drafter]
            layout = None if of_states is None else of_states.layout
            tiers.connect(connect_storage(store, tiers.host, tiers.agree, runners, params.enable_metrics, layout))
    return cache


@contextlib.contextmanager
def _host_share(share: float, layout: str) -> Iterator[None]:
    """A context in which SGLang's flags give this share of the host's memory, and no storage.

    SGLang's own storage would hold one object per token at page size 1, named by tokens only; ours is connected later.
    layout: of the host's memory. To one by pages the scheduler copies token by token, 7 us each; but SGLang keeps
    recurrent states in no other.
    """
    flags = get_memory()
    changed = {
        "hicache_storage_backend": None,
        "hicache_mem_layout": layout,
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


def _buffers(kv: Any) -> list[Sequence[torch.Tensor]]:
    """The buffers of each layer of SGLang's pool; none for layers without KV. Latents are one buffer."""
    if isinstance(kv, HybridLinearKVPool):
        with_kv, parts = kv.full_attention_layer_id_mapping, 1 if kv.use_mla else 2
        return [kv.get_kv_buffer(layer)[:parts] if layer in with_kv else () for layer in range(max(with_kv) + 1)]
    return [kv.get_kv_buffer(layer) for layer in range(kv.start_layer, kv.start_layer + kv.layer_num)]


def measured_host(collector: RadixCacheMetricsCollector) -> HostReport:
    """A report of the host tier, with the labels of SGLang's collector of its cache's metrics."""
    count_loaded = functools.partial(collector.increment_load_back_num_tokens, pool=PoolName.KV.value)
    return HostReport(count_loaded, counters_of("host", HOST_COUNTERS, collector.labels))

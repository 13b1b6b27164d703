"""Create the cache of a server, with the trees and tiers that its model and flags need."""

import types
from typing import Any

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.cache.radix import LazyRadixCache
from sglang_lazy.port.model.comb import chunk_pool_of


def new_cache(context: Any, runner: Any) -> LazyRadixCache:
    """The cache of a server.  context: SGLang's, for cache factories.  runner: a `ModelRunner` that reuses chunks."""
    params, args, pool = context.params, context.server_args, chunk_pool_of(runner)
    if not context.enable_hierarchical_cache:
        if pool is None:
            assert not context.is_hybrid_swa
            return LazyRadixCache(params)
        return TextRadixCache(params, chunks=LazyRadixCache(pool.tree_params(params)))
    if pool is None:
        cache = chunks = StoredHiRadixCache(params, _tier_flags(args, 1.0))
    else:
        share = LazyConfig.current().chunk_pool
        chunks = StoredHiRadixCache(pool.tree_params(params), _tier_flags(args, share))
        cache = TextHiRadixCache(params, _tier_flags(args, 1 - share), chunks=chunks)
    if args.hicache_storage_backend is not None:
        connect_storage(chunks, args, runner, params.enable_metrics)
    context.tp_worker.register_hicache_layer_transfer_counter(cache.cache_controller.layer_done_counter)
    return cache


def _tier_flags(args: Any, share: float) -> Any:
    """SGLang's flags for a pool with this share of the host's memory.

    Without SGLang's use of storage; ours is connected later. Laid out by layers, since at page size 1 the scheduler
    would copy to a host laid out by pages token by token, 7 us each.
    """
    changed = {
        "hicache_storage_backend": None,
        "hicache_mem_layout": "layer_first",
        "hicache_size": args.hicache_size * share,  # a ratio is already relative to the pool
    }
    return types.SimpleNamespace(**{**vars(args), **changed})

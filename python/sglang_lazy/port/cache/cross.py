"""The cache of text if chunks have their own tree and pool, of which SGLang is unaware."""

from typing import Any

from sglang_lazy.chunks.rows import RowCache
from sglang_lazy.port.cache.hiradix import LazyHiRadixCache
from sglang_lazy.port.cache.radix import LazyRadixCache
from sglang_lazy.port.cache.storage import StoredHiRadixCache


class TextRadixCache(LazyRadixCache):
    """The tree of text, including text that depends on chunks.  chunks: the tree of chunks."""

    def __init__(self, *params: Any, chunks: LazyRadixCache):
        self.chunks = chunks
        super().__init__(*params)
        self.store = chunks.store
        self.rows = RowCache(
            self.store,
            self.req_to_token_pool,
            self.token_to_kv_pool_allocator,
            self.rows.allocate,
            tree=self,
            chunk_allocator=chunks.token_to_kv_pool_allocator,
        )

    def reset(self) -> None:
        self.chunks.reset()
        self.chunks.token_to_kv_pool_allocator.clear()
        super().reset()


class TextHiRadixCache(TextRadixCache, LazyHiRadixCache):
    """The same with a host tier for both pools."""

    chunks: StoredHiRadixCache

    def __init__(self, *params: Any, chunks: StoredHiRadixCache):
        super().__init__(*params, chunks=chunks)
        chunks.host_report = self.host_report  # it counts both

    def detach_storage_backend(self) -> tuple[bool, str]:
        return self.chunks.detach_storage_backend()

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        self.chunks.check_hicache_events()

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads of both trees. All passes launched from now on wait before they read chunks, since the
        batch formed now may read none. For text, SGLang makes them wait."""
        if self.chunks.has_queued_loads:
            started = self.chunks.ready_to_load_host_cache()
            self.chunks.cache_controller.layer_done_counter.set_consumer(started)
        return super().ready_to_load_host_cache()

    @property
    def has_queued_loads(self) -> bool:
        return super().has_queued_loads or self.chunks.has_queued_loads

    def finish_loads(self) -> None:
        self.chunks.finish_loads()
        super().finish_loads()

"""Deletion of chunks on request, once nobody holds them."""

from typing import TYPE_CHECKING

from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.core.keys import ChunkKey

if TYPE_CHECKING:
    from sglang_lazy.chunks.store import ChunkStore


class Deletions:
    """The chunks of one `ChunkStore` that are to be deleted."""

    def __init__(self, store: "ChunkStore"):
        self.store = store
        self.waiting: dict[ChunkKey, CachedChunk] = {}

    def add(self, chunk: CachedChunk) -> None:
        """Have a chunk removed by the first sweep that finds nobody holding it."""
        self.waiting[chunk.key] = chunk

    def sweep(self) -> None:
        """Remove the chunks that nobody holds from device and host. A beginning shared with other chunks stays."""
        tree = self.store.tree
        for key, chunk in list(self.waiting.items()):
            node = chunk.node
            if node is not None and tree.is_held(node):
                continue
            del self.waiting[key]
            if node is None:
                continue
            self.store.forget(node)
            while self.store.chunk_at(node) is None and tree.discard(node):
                node = node.parent

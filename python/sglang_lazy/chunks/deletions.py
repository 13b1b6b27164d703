"""Deletion of chunks on request, once nobody holds them."""

from typing import Any

import torch

from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.core.keys import ChunkKey


class Deletions:
    """The chunks of one `ChunkStore` that are to be deleted."""

    def __init__(self, store: Any):
        self.store = store
        self.waiting: dict[ChunkKey, CachedChunk] = {}

    def add(self, chunk: CachedChunk) -> None:
        """Have a chunk removed by the first sweep that finds nobody holding it."""
        self.waiting[chunk.key] = chunk

    def sweep(self) -> list[torch.Tensor]:
        """Remove the chunks that nobody holds from device and host; returns their slots for the caller to free.

        A beginning shared with other chunks stays.
        """
        tree, slots = self.store.tree, []
        for key, chunk in list(self.waiting.items()):
            node = chunk.node
            if node is not None and (node.lock_ref or node.host_ref_counter):
                continue
            del self.waiting[key]
            if node is None:
                continue
            self.store.forget(node)
            while tree.discardable(node) and self.store.chunk_at(node) is None:
                parent = node.parent
                slots += tree.discard(node)
                node = parent
        return slots

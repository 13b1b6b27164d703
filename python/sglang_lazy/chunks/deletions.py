"""Chunks that are to leave the cache although there is room for them."""

from typing import Any

import torch

from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.core.keys import ChunkKey


class Deletions:
    """Those that somebody still holds, of one `ChunkStore`."""

    def __init__(self, store: Any):
        self.store = store
        self.waiting: dict[ChunkKey, CachedChunk] = {}

    def add(self, chunk: CachedChunk) -> None:
        """Have the next sweep take a chunk out of the tree, or the first one after nobody holds it any more."""
        self.waiting[chunk.key] = chunk

    def sweep(self) -> list[torch.Tensor]:
        """Take the chunks that nobody holds off the device and the host; returns their slots, to be freed.

        What other chunks begin with stays, as part of those.
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

"""SGLang's own caches over a pool of slots without KV, and an LRU cache of chunks."""

from array import array
from collections import OrderedDict
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey


class NoKV:
    """The pool behind an allocator whose slots are only counted."""

    dtype, device = torch.float16, "cpu"


def new_allocator(size: int) -> TokenToKVPoolAllocator:
    """Slots 1 to `size`."""
    return TokenToKVPoolAllocator(size, NoKV.dtype, NoKV.device, NoKV(), need_sort=False)


class SGLangTree:
    """SGLang's `RadixCache`.  It evicts the least recently used leaf of all."""

    def __init__(self, slots: TokenToKVPoolAllocator):
        self.slots = slots
        self.cache: Any = RadixCache.create_simulated(mock_allocator=slots)

    def take(self, tokens: array, namespace: str | None, make_room: Any) -> int:
        """Find `tokens` or insert what is missing, after `make_room` for it; returns how many were found."""
        key = RadixKey(tokens, namespace)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        num_found = getattr(found, "device_prefix_len", None)
        num_found = len(found.device_indices) if num_found is None else num_found
        self.cache.inc_lock_ref(found.last_device_node)
        make_room(len(tokens) - num_found)
        new = self.slots.alloc(len(tokens) - num_found)
        self.cache.dec_lock_ref(found.last_device_node)
        value = torch.cat([torch.zeros(num_found, dtype=torch.int64), new])
        self.cache.insert(InsertParams(key=key, value=value, prev_prefix_len=num_found))
        return num_found

    def evict(self, num_tokens: int) -> int:
        return self.cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted

    @property
    def num_tokens(self) -> int:
        return self.cache.evictable_size() + self.cache.protected_size()


class Chunks:
    """Chunks, the least recently used first."""

    def __init__(self, slots: TokenToKVPoolAllocator):
        self.slots, self.now = slots, 0
        self.kept: OrderedDict[int, tuple[int, torch.Tensor]] = OrderedDict()

    def take(self, tokens: array, make_room: Any) -> int:
        self.now += 1
        if found := self.kept.pop(tokens[0], None):
            self.kept[tokens[0]] = self.now, found[1]
            return len(tokens)
        make_room(len(tokens))
        self.kept[tokens[0]] = self.now, self.slots.alloc(len(tokens))
        return 0

    def oldest(self) -> int | None:
        return next(iter(self.kept.values()))[0] if self.kept else None

    def evict(self, num_tokens: int) -> int:
        num_evicted = 0
        while self.kept and num_evicted < num_tokens:
            _, (_, slots) = self.kept.popitem(last=False)
            self.slots.free(slots)
            num_evicted += len(slots)
        return num_evicted

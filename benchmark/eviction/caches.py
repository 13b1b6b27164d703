"""Caches over a pool of slots without KV: what servers have, and one exact LRU tree for everything."""

import itertools
from array import array
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from benchmark.eviction.workload import Request
from sglang_lazy.cache.node import ORDERS
from sglang_lazy.cache.room import Amounts, Room
from sglang_lazy.cache.states import States
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.core.keys import Namespace
from sglang_lazy.port.cache.plain import PlainCache
from sglang_lazy.recurrent.pool import StateLayout, StatePool

CHUNKS = Namespace("chunk", None, None)


class NoKV:
    """The pool behind an allocator whose slots are only counted."""

    dtype, device = torch.float16, "cpu"


class Cache(Protocol):
    """What requests are served from."""

    def serve(self, request: Request) -> int:
        """Find a request's texts, and insert what is missing; returns how many tokens were found."""

    def check(self) -> None:
        """Fail unless every slot is free or in one tree."""


class ExactLRU:
    """Both kinds of requests in one tree, which evicts the least recently used leaf of all.  size: slots."""

    def __init__(self, size: int):
        self._slots = _new_allocator(size)
        self._tree = RadixTree(self._slots, ORDERS["lru"])

    def serve(self, request: Request) -> int:
        namespace = CHUNKS if request.linked else None
        return sum(_take(self._tree, text, namespace, self._make_room) for text in request.texts)

    def _make_room(self, num_tokens: int) -> torch.Tensor:
        self._tree.evict(num_tokens - self._slots.available_size())
        return self._slots.alloc(num_tokens)

    def check(self) -> None:
        assert self._slots.available_size() + self._tree.num_evictable == self._slots.size


class TwoTrees:
    """What a server has: SGLang's own cache for prompts without chunks, and our tree, with what evicts from both."""

    def __init__(self, size: int):
        self._slots = _new_allocator(size)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, 1, "cpu", enable_memory_saver=False),
            token_to_kv_pool_allocator=self._slots,
            page_size=1,
            tree_components=(ComponentType.FULL,),
        )
        self._plain, self._clock = UnifiedRadixCache(params), itertools.count(1)
        self._tree = RadixTree(self._slots, ORDERS["lru"], self._clock)
        self._other = other = PlainCache(self._plain)
        self._room = Room(other, self._tree, None)

    def serve(self, request: Request) -> int:
        if request.linked:
            return sum(_take(self._tree, text, CHUNKS, self._make_room) for text in request.texts)
        return sum(map(self._take_plain, request.texts))

    def _take_plain(self, text: array) -> int:
        key = RadixKey(text)
        found = self._plain.match_prefix(MatchPrefixParams(key=key))
        lock, count = self._plain.lock(found.last_device_node), found.device_prefix_len
        new = self._make_room(len(text) - count)
        held = self._plain.path_device_indices(found.last_device_node)
        self._plain.unlock(lock)
        self._plain.insert(InsertParams(key=key, value=torch.cat([held, new]), prev_prefix_len=count))
        self._room.mirror.touch(text, None, next(self._clock))
        return count

    def _make_room(self, num_tokens: int) -> torch.Tensor:
        if (lacking := num_tokens - self._slots.available_size()) > 0:
            self._room.evict(Amounts(lacking), self._other.evict)
        return self._slots.alloc(num_tokens)

    def check(self) -> None:
        cached = self._tree.num_evictable + self._plain.full_evictable_size()
        assert self._slots.available_size() + cached == self._slots.size


class WithStates:
    """Our tree for a model with recurrent layers, where each chunk has a state beside its KV.

    size: slots.  num_states: in the pool of states. Prompts with chunks only, which both hold at once.
    """

    def __init__(self, size: int, num_states: int):
        self._slots = _new_allocator(size)
        self._tree = RadixTree(self._slots, ORDERS["lru"])
        self._pool = StatePool(StateLayout(1, ((1, 1),), torch.int8), num_states, "cpu")
        self._states = States(self._tree, self._pool)
        self._tree.parts = (self._states,)

    def serve(self, request: Request) -> int:
        found = [self._tree.find(text, CHUNKS) for text in request.texts]
        held = [node for _, node in found]
        for node in held:
            self._tree.lock(node)
        for text, (slots, _) in zip(request.texts, found, strict=True):
            if len(slots) < len(text):
                self._tree.evict(len(text) - self._slots.available_size())
                (state,) = self._states.allocate(1)
                new = self._slots.alloc(len(text))
                added = self._tree.add(text, CHUNKS, new, 0, 0)
                self._slots.free(new[: added.num_present])  # another chunk begins alike
                self._states.give(added.node, state)
                self._tree.lock(added.node)
                held.append(added.node)
        for node in held:
            self._tree.unlock(node)
        return sum(len(slots) for slots, _ in found)

    def check(self) -> None:
        assert self._slots.available_size() + self._tree.num_evictable == self._slots.size
        assert self._pool.available_size() + self._states.num_evictable == self._pool.size


def _take(tree: RadixTree, text: array, namespace: Any, make_room: Any) -> int:
    """Find `text` or insert what is missing; returns how many tokens were found."""
    slots, node = tree.find(text, namespace)
    tree.lock(node)
    new = make_room(len(text) - len(slots))
    tree.unlock(node)
    tree.add(text, namespace, torch.cat([slots, new]), 0, 0)
    return len(slots)


def _new_allocator(size: int) -> TokenToKVPoolAllocator:
    """Slots 1 to `size`."""
    return TokenToKVPoolAllocator(size, NoKV.dtype, NoKV.device, NoKV(), need_sort=False)

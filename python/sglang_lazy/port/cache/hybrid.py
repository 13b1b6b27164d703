"""The radix cache over SGLang's hybrid pool, in which layers with windows have fewer slots than the others.

A cached token has KV in all other layers. Its *window KV*, a slot of the smaller pool, may be evicted earlier. A prefix
or chunk can be read if its last tokens, as many as a window holds, still have their window KV.
"""

import dataclasses
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InsertParams, InsertResult
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_lazy.cache.eviction import EvictionHeap
from sglang_lazy.chunks.tree import Inserted, WindowMemory
from sglang_lazy.core.keys import of_chunks
from sglang_lazy.port.cache.radix import LazyRadixCache


@dataclasses.dataclass
class WindowKV:
    """The window KV of all tokens of a tree node.

    last_use: as counted by the tree; 0 for a chunk that has not been used since it was computed.
    """

    last_use: int
    lock_ref: int = 0


class LazyHybridCache(LazyRadixCache):
    """A cache whose nodes lose their window KV when its pool runs short, the least recently used first.

    A lock on a node also locks the window KV of a number of tokens up to the end of that node. If the first of them is
    inside a node, that node is split, so that the same tokens can be unlocked later.
    """

    def __init__(self, params: CacheInitParams, *more: Any):
        self.sliding_window_size: int = params.sliding_window_size  # SGLang counts the tokens before a query
        super().__init__(params, *more)

    def reset(self) -> None:
        self._windows: dict[TreeNode, WindowKV] = {}  # of the nodes that have any
        self._window_heap = EvictionHeap(lambda node: self._windows[node].last_use)
        self._unlocked_windows: set[TreeNode] = set()
        self._num_locked = self._num_unlocked = 0  # tokens
        self._own_start = 0  # in the row that SGLang inserts next, where the request's own slots with window KV begin
        super().reset()

    # SGLang's interface of a cache over its hybrid pool

    def supports_swa(self) -> bool:
        return True

    def full_evictable_size(self) -> int:
        return self.evictable_size()

    def full_protected_size(self) -> int:
        return self.protected_size()

    def swa_evictable_size(self) -> int:
        return self._num_unlocked

    def swa_protected_size(self) -> int:
        return self._num_locked

    def sanity_check(self) -> None:
        """Nothing: SGLang also compares sizes at each idle step, which suffices."""

    @property
    def device_memory(self) -> dict[str, int]:
        slots = self.token_to_kv_pool_allocator
        return {"size": slots.size_full, "free": slots.full_available_size()}

    @property
    def window_memory(self) -> WindowMemory:
        slots = self.token_to_kv_pool_allocator
        return WindowMemory(slots.size_swa, slots.swa_available_size() + self._num_unlocked, self.sliding_window_size)

    # Reading

    def reads(self, node: TreeNode, spread: int = 0) -> bool:
        count = self.sliding_window_size + spread
        while count > 0 and node is not self.root_node:
            if node not in self._windows:
                return False
            count -= len(node.key)
            node = node.parent
        return True

    def _match_prefix_helper(self, node: TreeNode, key: RadixKey) -> tuple[list[torch.Tensor], TreeNode]:
        """The longest prefix that can be read."""
        pieces, end = super()._match_prefix_helper(node, key)
        super().use(end)  # also what cannot be read: SGLang has stamped all of it
        node, num_passed, num_left_out, count = end, 0, 0, 0
        while node is not self.root_node and count < self.sliding_window_size:
            num_passed += 1
            if node in self._windows:
                count += len(node.key)
            else:
                end, num_left_out, count = node.parent, num_passed, 0
            node = node.parent
        return pieces[: len(pieces) - num_left_out], end

    def find(self, tokens: array, namespace: Any, complete: bool = False) -> tuple[torch.Tensor, TreeNode]:
        slots, end = super().find(tokens, namespace)
        node, num_passed, num_left_out = end, 0, 0
        while complete and node is not self.root_node:
            num_passed += len(node.key)
            if node not in self._windows:
                end, num_left_out = node.parent, num_passed
            node = node.parent
        return slots[: len(slots) - num_left_out], end

    def use(self, node: TreeNode, priority: int | None = None, spread: int = 0) -> None:
        super().use(node, priority)
        if node is self.root_node:
            return
        # Text is matched again without its last token, which is computed in any case.
        count, now = self.sliding_window_size + spread + (not of_chunks(node.key.extra_key)), node.last_access_time
        while count > 0 and node is not self.root_node:
            if (kept := self._windows.get(node)) is not None:
                kept.last_use = now
            count -= len(node.key)
            node = node.parent

    # Locks

    def lock(self, node: TreeNode, spread: int = 0) -> int:
        change = super().lock(node, spread)
        for held in self._last(node, self.sliding_window_size + spread):
            window_kv = self._windows[held]
            if not window_kv.lock_ref:
                self._unlocked_windows.discard(held)
                self._num_unlocked -= len(held.key)
                self._num_locked += len(held.key)
            window_kv.lock_ref += 1
        return change

    def unlocked_windows(self, node: TreeNode, spread: int = 0) -> int:
        count, num_unlocked = self.sliding_window_size + spread, 0
        while count > 0 and node is not self.root_node:
            num_unlocked += 0 if self._windows[node].lock_ref else min(count, len(node.key))
            count -= len(node.key)
            node = node.parent
        return num_unlocked

    def unlock(self, node: TreeNode, spread: int = 0) -> int:
        for held in self._last(node, self.sliding_window_size + spread):
            window_kv = self._windows[held]
            window_kv.lock_ref -= 1
            if not window_kv.lock_ref:
                self._num_locked -= len(held.key)
                self._num_unlocked += len(held.key)
                self._offer_window(held)
        return super().unlock(node, spread)

    def _last(self, node: TreeNode, count: int) -> Iterator[TreeNode]:
        """The nodes of the last `count` tokens up to the end of `node`, last node first, splitting one if needed."""
        while count > 0 and node is not self.root_node:
            if count < len(node.key):
                self._split_node(node.key, node, len(node.key) - count)
            count -= len(node.key)
            yield node
            node = node.parent

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        node = super()._split_node(key, child, split_len)
        if (window_kv := self._windows.get(child)) is not None:
            self._windows[node] = dataclasses.replace(window_kv)
            if not window_kv.lock_ref:
                self._offer_window(node)
        return node

    def _offer_window(self, node: TreeNode) -> None:
        self._unlocked_windows.add(node)
        self._window_heap.push(node, self._unlocked_windows)

    # Insertion

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        self._own_start = req.cache_protected_len
        super().cache_unfinished_req(req, chunked=chunked)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        self._own_start = max(req.cache_protected_len, self.num_lost(req))
        super().cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=kv_len_to_handle)

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert a plain request, for SGLang's code: its passes were launched, and it frees duplicate slots at once."""
        inserted = super().insert(params)
        self.take_lent(self._keep_windows(inserted, params.value, self._own_start))
        return inserted

    def add(
        self,
        tokens: array,
        namespace: Any,
        slots: torch.Tensor,
        priority: int,
        computed_start: int,
        chunked: bool = False,
    ) -> Inserted:
        params = InsertParams(key=RadixKey(tokens, namespace), value=slots, priority=priority, chunked=chunked)
        inserted = super().insert(params)
        lent = self._keep_windows(inserted, slots, computed_start)
        return Inserted(inserted.prefix_len, inserted.last_device_node, lent)

    def _keep_windows(self, inserted: InsertResult, slots: torch.Tensor, start: int) -> torch.Tensor:
        """Give inserted nodes without window KV that of `slots`, which have it from `start` on. Returns the slots that
        now share it with a node's own slots."""
        mapping, lent = self.token_to_kv_pool_allocator.full_to_swa_index_mapping, [slots[:0]]
        node, end = inserted.last_device_node, len(slots)
        while end > start:
            if node not in self._windows:
                if end - len(node.key) < start:
                    self._split_node(node.key, node, start - end + len(node.key))
                own = slots[end - len(node.key) : end]
                if end <= inserted.prefix_len:
                    mapping[node.value] = mapping[own]
                    lent.append(own)
                self._windows[node] = WindowKV(last_use=0 if of_chunks(node.key.extra_key) else node.last_access_time)
                self._num_unlocked += len(node.key)
                self._offer_window(node)
            end -= len(node.key)
            node = node.parent
        return torch.cat(lent)

    def take_lent(self, slots: torch.Tensor) -> None:
        if len(slots):
            self.token_to_kv_pool_allocator.full_to_swa_index_mapping[slots] = 0

    def num_lost(self, req: Any) -> int:
        return req.kv.swa_evicted_seqlen

    # Eviction

    def evict(self, params: EvictParams) -> EvictResult:
        slots = self.token_to_kv_pool_allocator
        wanted = slots.swa_available_size() + params.swa_num_tokens
        result = super().evict(params)
        while slots.swa_available_size() < wanted:
            node = self._window_heap.pop(self._unlocked_windows)
            if node is not None:
                self._evict_window(node)
            elif not self._nodes.release_waiting_lock():
                break
        return result

    def _evict_window(self, node: TreeNode) -> None:
        """Evict a node's window KV. A leaf cannot be read without it, so a leaf leaves the tree unless it is held."""
        slots = self.token_to_kv_pool_allocator
        if node in self.evictable_leaves:
            slots.free(self._nodes.evict_leaf(node))
            return
        self._drop_window(node)
        slots.free_swa(node.value)
        behind = [(node, 0)]
        while behind:  # forget chunks that end less than a window later
            end, distance = behind.pop()
            self._nodes.forget(end)
            nearer = ((child, distance + len(child.key)) for child in end.children.values())
            behind += [(child, far) for child, far in nearer if far < self.sliding_window_size]

    def _delete_leaf(self, node: TreeNode) -> None:
        if node in self._windows:
            self._drop_window(node)
        super()._delete_leaf(node)

    def _drop_window(self, node: TreeNode) -> None:
        del self._windows[node]
        self._unlocked_windows.remove(node)
        self._num_unlocked -= len(node.key)

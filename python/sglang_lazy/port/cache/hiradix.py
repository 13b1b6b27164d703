"""The cache with SGLang's host tier: what the device evicts stays in host memory, and is loaded when it is needed.

SGLang's `HiRadixCache` keeps the copies and moves KV with its cache controller, on streams of their own. Here are the
differences that chunks make: what is backed up and when, and eviction without sorting all leaves.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InsertParams, InsertResult
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_lazy.cache.eviction import EvictionHeap
from sglang_lazy.core.keys import Namespace
from sglang_lazy.port.cache.copies import Copies
from sglang_lazy.port.cache.loads import HostLoads
from sglang_lazy.port.cache.radix import LazyRadixCache
from sglang_lazy.port.cache.tier_report import HostReport


class _HiRadixCache(HiRadixCache):
    """Reports the node at which an insertion ends, as SGLang's `RadixCache` does."""

    def insert(self, params: InsertParams) -> InsertResult:
        inserted = super().insert(params)
        inserted.last_device_node = self._match_prefix_helper(self.root_node, params.key)[1]
        return inserted


class LazyHiRadixCache(HostLoads, LazyRadixCache, _HiRadixCache):
    """A node is on the device, on the host, or on both. Nodes only on the host are below those on the device.

    A copy on the host is complete once nobody holds its node: SGLang keeps it locked until then.
    """

    def __init__(self, params: Any, server_args: Any):
        super().__init__(params, server_args)
        collector = self.metrics_collector
        self.host_report = HostReport() if collector is None else HostReport.measured(collector.labels)
        self.load_back_threshold = 0  # a chunk is loaded whole, however short

    def reset(self) -> None:
        self._host_heap = EvictionHeap(lambda node: self.eviction_strategy.get_priority(node))
        self._on_device: set[int] = set()
        self._copies = Copies(self._nodes.next_leaves, self.token_to_kv_pool_allocator.size)
        self._queued = set()
        self._num_children_on_device: dict[int, int] = {}
        num_nodes = TreeNode.counter
        super().reset()
        TreeNode.counter += num_nodes  # SGLang starts anew, although other caches of the process may have these ids

    def attach_storage_backend(self, *_args: Any, **_kwargs: Any) -> tuple[bool, str]:
        return False, "sglang-lazy connects storage at the start alone: --hicache-storage-backend"

    # Leaves: SGLang looks for a child with KV among all children; there may be as many as the host has chunks.

    def _update_leaf_status(self, node: TreeNode) -> None:
        self._count(node)
        super()._update_leaf_status(node)

    def _count(self, node: TreeNode) -> None:
        """Update the parent's count of a node that has come to the device or left it."""
        if node is self.root_node or node.evicted == (node.id not in self._on_device):
            return
        (self._on_device.discard if node.evicted else self._on_device.add)(node.id)
        parent = node.parent
        count = self._num_children_on_device.pop(parent.id, 0) + (-1 if node.evicted else 1)
        if count:
            self._num_children_on_device[parent.id] = count
        super()._update_leaf_status(parent)

    def _lock_changed(self, node: TreeNode) -> None:
        """A locked node has slots before and after: nothing else changes."""
        super()._update_leaf_status(node)

    def _is_leaf(self, node: TreeNode) -> bool:
        return not node.evicted and node.id not in self._num_children_on_device

    def _update_host_leaf_status(self, node: TreeNode) -> None:
        super()._update_host_leaf_status(node)
        if node in self.evictable_host_leaves:
            self._host_heap.push(node, self.evictable_host_leaves)

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        node = super()._split_node(key, child, split_len)
        if not node.evicted:
            self._on_device.add(node.id)
            self._num_children_on_device[node.id] = 1
            if child.id in self._queued:
                self._queued.add(node.id)
            self._copies.split(node, child)
        return node

    # Eviction

    def evict(self, params: EvictParams) -> EvictResult:
        """Copies in progress lock what they read or write: if eviction falls short, it waits for them."""
        evicted = super().evict(params).num_tokens_evicted
        if evicted < params.num_tokens and (self.ongoing_write_through or self.ongoing_load_back):
            self.finish_loads()
            controller = self.cache_controller
            self.writing_check(finish_count=len(controller.ack_write_queue))
            self.loading_check(finish_count=len(controller.ack_load_queue))
            evicted += super().evict(EvictParams(num_tokens=params.num_tokens - evicted)).num_tokens_evicted
        return EvictResult(num_tokens_evicted=evicted)

    def remove(self, leaf: TreeNode) -> torch.Tensor:
        slots = leaf.value
        self._copies.left(leaf, slots.numel())
        if leaf.backuped:
            self._detach_backuped(leaf)
        else:
            super().remove(leaf)
            self._count(leaf)
        return slots

    def evict_host(self, num_tokens: int) -> None:
        """Free `num_tokens`, or fewer if there are no more: first copies of nodes that are on the device as well, then
        leaves that are only on the host, which leave the tree."""
        num_evicted, protected = 0, []
        for node in self._copies.give_up(num_tokens):
            self.host_report.gave_up(len(node.key))
            num_evicted += self.cache_controller.evict_host(node.host_value)
            self._record_remove_event(node, medium=StorageMedium.CPU)
            node.host_value = None
        while num_evicted < num_tokens and (leaf := self._host_heap.pop(self.evictable_host_leaves)) is not None:
            if leaf.host_ref_counter:
                protected.append(leaf)
                continue
            num_evicted += self._remove_from_host(leaf)
        for leaf in protected:
            self._host_heap.push(leaf, self.evictable_host_leaves)

    def _remove_from_host(self, leaf: TreeNode) -> int:
        num_tokens = self.cache_controller.evict_host(leaf.host_value)
        self._record_remove_event(leaf, medium=StorageMedium.CPU)
        leaf.host_value = None
        self.evictable_host_leaves.remove(leaf)
        del leaf.parent.children[leaf.key.child_key(self.page_size)]
        self._update_host_leaf_status(leaf.parent)
        self._nodes.forget(leaf)
        return num_tokens

    def discard(self, node: TreeNode) -> list[torch.Tensor]:
        slots = [] if node.evicted else super().discard(node)
        if node.backuped:
            self._remove_from_host(node)
        return slots

    # Copies to the host

    def back_up(self, nodes: Iterable[TreeNode]) -> None:
        selective = self.write_through_threshold > 1
        with self._one_copy():
            for node in itertools.chain(filter(self._copies.wanted, nodes), self._copies.to_copy()):
                path = []
                while node is not self.root_node and not node.backuped:
                    path.append(node)
                    node = node.parent
                for node in reversed(path):  # none has a copy whose parent has none
                    if selective and node.hit_count < self.write_through_threshold or not self.write_backup(node):
                        break

    @contextlib.contextmanager
    def _one_copy(self) -> Iterator[None]:
        """A context that copies all nodes written in it together, where SGLang would start a copy for each."""
        controller = self.cache_controller
        start, controller.start_writing = controller.start_writing, lambda: None
        try:
            yield
        finally:
            controller.start_writing = start
        start()

    def write_backup(self, node: TreeNode, write_back: bool = False) -> int:
        """Text after chunks is not copied: a linked request finds it only on the device."""
        namespace = node.key.extra_key
        if isinstance(namespace, Namespace) and namespace.kind == "text":
            return 0
        self._after_passes(self.cache_controller.write_stream)
        node.parent.protect_host()  # making room must not take its copy
        num_copied = super().write_backup(node, write_back)
        node.parent.release_host()
        if num_copied:
            self._copies.copied(node)
            self.host_report.backed_up(num_copied)
        return num_copied

    def _finish_write_through_ack(self, ack_id: int, *, release_lock: bool) -> None:
        _, _, nodes = self.ongoing_write_through[ack_id]
        super()._finish_write_through_ack(ack_id, release_lock=release_lock)
        for node in nodes:
            self._copies.came(node)

    def _after_passes(self, stream: Any) -> None:
        """Make the next copies on `stream` wait for all launched forward passes, which SGLang does not.

        What is copied to the host may have been published ahead of its computation, and a decode step still writes a
        last token for each request that has ended, into a slot that is free by now.
        """
        if self.forward_stream is not None:
            stream.wait_stream(self.forward_stream)

    @property
    def host_memory(self) -> dict[str, int] | None:
        pool = self.token_to_kv_pool_host
        return {"size": pool.size, "free": pool.available_size()}

    @property
    def is_copying(self) -> bool:
        return bool(self.ongoing_write_through or self.ongoing_load_back)

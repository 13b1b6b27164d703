"""Copies from the host: chunks are loaded when requests with them are admitted."""

from collections.abc import Iterable, Sequence

import torch
from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import TreeNode


class HostLoads(HiRadixCache):
    """The part of `LazyHiRadixCache` that loads.

    _queued: ids of the nodes whose load no batch has started yet.
    """

    _queued: set[int]

    def load(self, nodes: Sequence[TreeNode]) -> bool:
        """In one copy, where SGLang's `load_back` would queue one for each node."""
        to_load = self._only_on_host(nodes)
        if not self._make_room(to_load):
            return False
        controller, ends = self.cache_controller, {node.id: node for node in nodes}
        copies = [node.host_value for node in to_load]
        slots = controller.load(torch.cat(copies), **self._get_extra_pools())
        controller.load_queue[-1].node_ids = list(ends)  # SGLang acknowledges these
        self.ongoing_load_back.update(ends)
        for node, own in zip(to_load, slots.split([copy.numel() for copy in copies]), strict=True):
            node.value = own.clone()  # a part would keep all of `slots`
            self._record_store_event(node, medium=StorageMedium.GPU)
        self.evictable_size_ += slots.numel()
        for node in ends.values():
            self.lock(node)
        self._have_come(to_load)
        self._queued.update([node.id for node in to_load])
        return True

    def load_back(self, node: TreeNode, mem_quota: int | None = None) -> torch.Tensor | None:
        to_load = self._only_on_host([node])
        slots = super().load_back(node, mem_quota) if self._make_room(to_load) else None
        if slots is not None:
            self._have_come(to_load)
        return slots

    def _only_on_host(self, nodes: Iterable[TreeNode]) -> list[TreeNode]:
        """Those of `nodes` and their ancestors that are only on the host, parents first."""
        found: dict[int, TreeNode] = {}
        for node in nodes:
            path = []
            while node.evicted and node.id not in found:
                path.append(node)
                node = node.parent
            found.update((node.id, node) for node in reversed(path))
        return list(found.values())

    def _make_room(self, to_load: Sequence[TreeNode]) -> bool:
        """Make room on the device for all these nodes. Evicts only what is lacking, and nothing if that would not
        suffice; then returns False.

        SGLang would evict as much as it loads, and so revoke locks of waiting requests: of the one that loads, and of
        those that it is forming a batch from.
        """
        num_tokens = sum([node.host_value.numel() for node in to_load])
        num_lacking = num_tokens - self.token_to_kv_pool_allocator.available_size()
        if num_lacking <= 0:
            return True
        above = dict.fromkeys(node.parent for node in to_load if not node.parent.evicted)
        for node in above:
            self.lock(node)
        if fits := num_lacking <= self.evictable_size():
            self.evict(EvictParams(num_tokens=num_lacking))
        for node in above:
            self.unlock(node)
        return fits

    def _have_come(self, nodes: Iterable[TreeNode]) -> None:
        """Called when nodes that were only on the host have got slots, and are locked."""
        for node in nodes:
            self._count(node)
            self._update_host_leaf_status(node)

    def loading_check(self, finish_count: int | None = None) -> None:
        before = dict(self.ongoing_load_back)
        super().loading_check(finish_count)
        for ack_id, node in before.items():
            if ack_id not in self.ongoing_load_back:
                self._copies.came(node)

    def loading(self, node: TreeNode) -> bool:
        if not node.lock_ref:  # SGLang locks what it loads; lists ask this of every chunk
            return False
        for end in self.ongoing_load_back.values():
            while end is not node and end is not self.root_node:
                end = end.parent
            if end is node:
                return True
        return False

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads, with the batch that SGLang forms."""
        if self.has_queued_loads:
            self._after_passes(self.cache_controller.load_stream)
            # SGLang reuses a few events, assuming that passes have waited for the oldest load.
            counter = self.cache_controller.layer_done_counter
            counter.events[(counter.producer_index + 1) % counter.num_counters].finish_event.synchronize()
        self._queued.clear()
        return super().ready_to_load_host_cache()

    @property
    def has_queued_loads(self) -> bool:
        return bool(self.cache_controller.load_queue)

    def started(self, nodes: Iterable[TreeNode]) -> bool:
        return not self._queued or self._queued.isdisjoint(node.id for node in nodes)

    def finish_loads(self) -> None:
        if self.ready_to_load_host_cache() >= 0:
            self.cache_controller.ack_load_queue[-1].finish_event.synchronize()

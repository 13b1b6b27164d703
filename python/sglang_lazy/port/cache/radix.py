"""SGLang's radix cache with chunks: the tree of the chunk store, with the interface of SGLang's scheduler.

Each slot of the pool is free, in exactly one tree node, or owned by one running request. The row of a linked request
also lists slots of shared nodes, which are neither counted nor freed with the request.
"""

import contextlib
import itertools
import time
from array import array
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang_lazy.chunks import fills
from sglang_lazy.chunks.rows import RowCache
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.chunks.tree import Inserted
from sglang_lazy.core.state import LinkedRequest, RowNodes, fill_of, linked, stand_in
from sglang_lazy.port.cache.one_pool import OnePool
from sglang_lazy.port.model.images import order_images

TreeNode.backuped, TreeNode.host_ref_counter = False, 0  # nodes have no copy on the host


class LazyRadixCache(OnePool, RadixCache):
    """SGLang's radix cache, whose nodes many rows may share at any position.

    SGLang's own code serves plain requests. Requests with chunks, and fills, go through `rows` and `store`, for which
    this class implements `sglang_lazy.chunks.tree.Tree`.

    Recency is a counter, not a time, so that all tensor-parallel ranks evict in the same order.

    store: of the chunks, which are in this tree; see `TextRadixCache` for a separate tree.
    more: further arguments of the next class in the method resolution order.
    num_locks: as in `Tree`.
    forward_stream: the stream of SGLang's forward passes, None without streams.
    """

    def __init__(self, params: CacheInitParams, *more: Any):
        self._ticks = itertools.count(1)
        self.store = self._nodes = ChunkStore(self, lambda node: self.eviction_strategy.get_priority(node))
        self.admission: Any = None  # set, like the stream, once SGLang's scheduler is complete
        self.forward_stream: Any = None
        self._ranks = False
        super().__init__(params, *more)
        self.rows = RowCache(
            self.store, self.req_to_token_pool, self.token_to_kv_pool_allocator, lambda n: alloc_token_slots(self, n)
        )

    def reset(self) -> None:
        left = [self.root_node] if hasattr(self, "root_node") else []  # SGLang calls this for a new tree, too
        super().reset()
        while left:
            node = left.pop()
            left += node.children.values()
            node.children.clear()  # cyclic references would leave the nodes to the garbage collector
            node.value = node.host_value = None  # marks it as gone for holders of references
        self.num_locks = 0
        self._nodes.reset()
        if self.admission is not None:
            self.admission.reset()

    # The tree

    def find(self, tokens: array, namespace: Any, complete: bool = False) -> tuple[torch.Tensor, TreeNode]:
        key = RadixKey(tokens, namespace)
        if not tokens or key.child_key() not in self.root_node.children:  # most chunks begin like no other
            return self._empty_device_indices, self.root_node
        found = self._match(MatchPrefixParams(key))
        return self.path_device_indices(found.last_device_node), found.last_device_node

    def end_of(self, tokens: array, namespace: Any) -> TreeNode | None:
        node, start, end = self.root_node, 0, len(tokens)
        while start < end:
            node = node.children.get(RadixKey(tokens[start : start + 1], namespace).child_key())
            if node is None:
                return None
            known = node.key.token_ids
            count = min(len(known), end - start)
            # Compare the last token first: different texts mostly differ there, which saves fetching the others.
            if known[count - 1] != tokens[start + count - 1] or known[:count] != tokens[start : start + count]:
                return None
            if count < len(known):
                return self._split_node(node.key, node, count)
            start += count
        return node

    def add(
        self,
        tokens: array,
        namespace: Any,
        slots: torch.Tensor,
        priority: int,
        computed_start: int,
        chunked: bool = False,
    ) -> Inserted:
        key = RadixKey(tokens, namespace)
        inserted = self.insert(InsertParams(key=key, value=slots, priority=priority, inserted_len=len(tokens)))
        return Inserted(inserted.prefix_len, inserted.last_device_node, self._empty_device_indices)

    def slots_to(self, node: TreeNode) -> list[torch.Tensor]:
        pieces = []
        while node is not self.root_node:
            pieces.append(node.value)
            node = node.parent
        return pieces[::-1]

    def use(self, node: TreeNode, priority: int | None = None, spread: int = 0) -> None:
        now = next(self._ticks)
        while node is not self.root_node:
            node.last_access_time = now
            if priority is not None:
                node.hit_count += 1
                node.priority = max(node.priority, priority)
            node = node.parent

    def hold(self, node: TreeNode, spread: int = 0) -> int:
        return self._add_locks(node, 1)

    def let_go(self, node: TreeNode, spread: int = 0) -> int:
        return self._add_locks(node, -1)

    def _add_locks(self, node: TreeNode, change: int) -> int:
        """As SGLang does, except that only a node's first lock and its last one touch the sets of leaves."""
        self.num_locks += change if node is not self.root_node else 0
        evictable = 0
        while node is not self.root_node:
            node.lock_ref += change
            if node.lock_ref == (change > 0):
                evictable -= change * node.value.numel()
                self._lock_changed(node)
            node = node.parent
        self.evictable_size_ += evictable
        self.protected_size_ -= evictable
        return evictable

    def _lock_changed(self, node: TreeNode) -> None:
        """Called when a node has got its first lock or lost its last one."""
        self._update_leaf_status(node)

    def remove(self, leaf: TreeNode) -> torch.Tensor:
        slots = leaf.value
        self._delete_leaf(leaf)
        self.kv_events.record_remove(leaf)
        leaf.value = None  # marks it as `evicted` for holders of references
        return slots

    def discardable(self, node: TreeNode) -> bool:
        idle = not (node.lock_ref or node.host_ref_counter)
        return node is not self.root_node and idle and not node.children

    def discard(self, node: TreeNode) -> list[torch.Tensor]:
        return [self.remove(node)]

    @property
    def device_memory(self) -> dict[str, int]:
        slots = self.token_to_kv_pool_allocator
        return {"size": slots.size, "free": slots.available_size()}

    # Recency: SGLang stamps nodes with the time of day.

    def _stamp(self, node: TreeNode) -> None:
        """Mark a node as new, whether inserted or split off."""
        node.last_access_time, node.creation_time = next(self._ticks), node.id

    def _match(self, params: MatchPrefixParams) -> MatchResult:
        found = super().match_prefix(params)
        self.use(_last_node(found))
        return found

    def insert(self, params: InsertParams) -> InsertResult:
        inserted = super().insert(params)
        self.use(inserted.last_device_node)
        return inserted

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        node = super()._split_node(key, child, split_len)
        self._stamp(child)
        self._stamp(node)
        return node

    # SGLang's interface

    @contextlib.contextmanager
    def ranking(self) -> Iterator[None]:
        """A context in which matches of waiting requests only tell how much is cached, without laying out rows."""
        self._ranks = True
        try:
            yield
        finally:
            self._ranks = False

    def _rank(self, req: Any, state: LinkedRequest) -> MatchResult:
        slots, on_host, longest = self.rows.rank(req, state, self.admission.cached(state))
        # A queue that is sorted by the tree of text must not lose requests with nodes of another tree.
        node = self.root_node if longest is None or self.store.tree is not self else longest
        return MatchResult(len(slots), node, node, node, host_hit_length=on_host)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        req = params.req
        if self._ranks and (waiting := linked(stand_in(req))) is not None:
            return self._rank(req, waiting)
        if (state := linked(req)) is not None:
            num_tokens = len(req.origin_input_ids) + len(req.output_ids)
            slots, nodes = self.rows.match(req, state, limit=req._compute_max_prefix_len(num_tokens))
            if state.prompt.images is not None:
                order_images(req.multimodal_inputs, state.prompt.images, state.row)
        elif (fill := fill_of(req)) is not None:
            slots, nodes = fills.match(self.rows, req, fill)
        else:
            return self._match(params)
        nodes.slots = slots
        return MatchResult(len(slots), last_device_node=nodes, last_host_node=nodes, best_match_node=nodes)

    def prefix_device_indices(self, req: Any) -> torch.Tensor:
        node = req.last_node
        return node.slots[: req.prefix_len] if isinstance(node, RowNodes) else super().prefix_device_indices(req)

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        state = linked(req)
        if state is None and fill_of(req) is None:
            return super().checkpoint(req, up_to=up_to)
        if state is not None and not state.recomputes:
            self.rows.publish(req, up_to, chunked=req.inflight_middle_chunks > 0)
            req.kv.cache_protected_len = up_to

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        if (state := linked(req)) is not None:
            state.policy.end(req, self.rows)
            if state.probe is not None:
                self.admission.end(req, done=checkpointed)
        elif (fill := fill_of(req)) is not None:
            fills.end(self.rows, req, fill)
            self.admission.end(req, done=fill.published)

    def inc_lock_ref(self, node: TreeNode | RowNodes) -> IncLockRefResult:
        return IncLockRefResult(delta=self.rows.lock(node) if isinstance(node, RowNodes) else self.hold(node))

    def dec_lock_ref(self, node: TreeNode | RowNodes, params: DecLockRefParams | None = None) -> DecLockRefResult:
        return DecLockRefResult(delta=self.rows.unlock(node) if isinstance(node, RowNodes) else self.let_go(node))

    def evict(self, params: EvictParams) -> EvictResult:
        start_time = time.perf_counter()
        num_evicted = 0
        if pieces := self._nodes.evict(params.num_tokens):
            slots = torch.cat(pieces)
            self.token_to_kv_pool_allocator.free(slots)
            num_evicted = len(slots)
        self.update_eviction_metrics(num_evicted, start_time)
        return EvictResult(num_tokens_evicted=num_evicted)

    def _update_leaf_status(self, node: TreeNode) -> None:
        """Make a leaf evictable if nothing holds it."""
        if node.lock_ref or not self._is_leaf(node):
            self.evictable_leaves.discard(node)
            return
        if node.creation_time != node.id:  # SGLang has just made it
            self._stamp(node)
        self.evictable_leaves.add(node)
        self._nodes.offer(node)

    def _is_leaf(self, node: TreeNode) -> bool:
        return not node.children


def _last_node(found: MatchResult) -> TreeNode:
    """The node at which a match ends, in any tier."""
    return found.last_host_node if found.last_host_node.evicted else found.last_device_node

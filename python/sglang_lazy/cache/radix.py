"""Chunk-keyed KV cache: SGLang's radix tree, with namespaces for chunks and for the text after them.

Every slot of the pool is free, in exactly one tree node, or owned by one running request. The row of a linked request
lists the slots of shared nodes; those are neither counted nor freed with the request.
"""

import dataclasses
import time
from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang_lazy.cache.eviction import EvictionHeap
from sglang_lazy.cache.prompt import ChunkRef, Row


class LinkHandle(NamedTuple):
    """All tree nodes that a linked request holds: what SGLang locks and unlocks as the request's `last_node`."""

    chunks: tuple[TreeNode, ...]
    spans: tuple[TreeNode, ...]


@dataclasses.dataclass
class ChunkCopy:
    """Slots of a request's own that hold its chunks, turned to their positions.

    source, slots: int64 [n], where each entry comes from and goes to.
    written: whether the copying has been launched.
    """

    source: torch.Tensor
    slots: torch.Tensor
    written: bool = False


class LazyRadixCache(RadixCache):
    """The radix tree, grown into a DAG: many paths reach the one copy of a chunk.

    A request is linked if it has a `link` (`scheduler.link.Link`); all others are handled by the stock tree.
    `release_waiting_lock` frees memory that waiting requests hold, newest first; it returns False when none is left.
    """

    def __init__(self, params: CacheInitParams):
        self.release_waiting_lock: Callable[[], bool] = lambda: False
        super().__init__(params)

    def reset(self) -> None:
        self._heap = EvictionHeap(self.eviction_strategy.get_priority)
        super().reset()

    # Chunks

    def find_chunk(self, chunk: ChunkRef) -> TreeNode | None:
        """The node at which the used part of `chunk` ends, or None if it is not resident in full. Counts as a use."""
        match = self._match(chunk.tokens[: chunk.used], chunk.namespace)
        return match.last_device_node if len(match.device_indices) == chunk.used else None

    def _match(self, tokens: array, namespace: tuple | str | None) -> MatchResult:
        return super().match_prefix(MatchPrefixParams(key=RadixKey(tokens, namespace)))

    # Linked requests

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        link = getattr(params.req, "link", None)
        return super().match_prefix(params) if link is None else self._match_linked(params.req)

    def _match_linked(self, req) -> MatchResult:
        """Lay out the request's row by what is cached, and give its cached entries as the prefix.

        Sets `req.link.row` and permutes `req.full_untruncated_fill_ids` into row order. All chunks must be resident.
        """
        link = req.link
        ids = req.origin_input_ids + req.output_ids
        limit = req._compute_max_prefix_len(len(ids))
        chunks = [self._match(chunk.tokens[: chunk.used], chunk.namespace) for chunk in link.prompt.chunks]
        for chunk, match in zip(link.prompt.chunks, chunks, strict=True):
            assert len(match.device_indices) == chunk.used, f"request {req.rid} was scheduled before its chunks"
        last = link.prompt.spans[-1]
        spans = [
            self._match(ids[span.start : limit if span is last else span.end], self._namespace(req, span))
            for span in link.prompt.spans
        ]
        link.row = Row(link.prompt, [len(match.device_indices) for match in spans], len(ids))
        permuted = np.frombuffer(ids, dtype=np.int64)[link.row.positions]
        req.full_untruncated_fill_ids = array("q", permuted.tobytes())
        if not req.retracted_stain:
            # SGLang counts the prefix beyond `already_computed` as cached: leave out what this request had computed.
            req.already_computed = link.num_fresh_tokens
        handle = LinkHandle(
            tuple(match.last_device_node for match in chunks), tuple(match.last_device_node for match in spans)
        )
        return MatchResult(
            device_indices=torch.cat([match.device_indices for match in chunks + spans]),
            last_device_node=handle,
            last_host_node=handle,
            best_match_node=handle,
        )

    @staticmethod
    def _namespace(req, span) -> tuple | str | None:
        return req.extra_key if span.namespace is None else span.namespace

    def cache_unfinished_req(self, req, chunked: bool = False) -> None:
        if getattr(req, "link", None) is None:
            return super().cache_unfinished_req(req, chunked=chunked)
        row_len = len(req.get_fill_ids())
        self._publish(req, row_len, chunked)
        req.cache_protected_len = row_len
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, :row_len]
        req.prefix_indices = row.to(torch.int64, copy=True)

    def cache_finished_req(self, req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        if getattr(req, "link", None) is None:
            return super().cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=kv_len_to_handle)
        if is_insert and not self.disable_finished_insert:
            self._publish(req, kv_len_to_handle, chunked=False)
        else:
            owned = self.req_to_token_pool.req_to_token[req.req_pool_idx, req.cache_protected_len : kv_len_to_handle]
            self.token_to_kv_pool_allocator.free(owned)
        self.dec_lock_ref(req.last_node)
        if req.link.copy is not None:
            self.token_to_kv_pool_allocator.free(req.link.copy.slots)
            req.link.copy = None

    def _publish(self, req, row_len: int, chunked: bool) -> None:
        """Give the text in the first `row_len` entries of the row to the tree, and lock it there.

        Where the tree got the same text from another request in the meantime, ours is freed and the row is rewritten
        with the tree's slots, so that afterwards every entry of those `row_len` belongs to the tree.
        """
        row, handle = req.link.row, req.last_node
        slots = self.req_to_token_pool.req_to_token[req.req_pool_idx]
        ids = req.origin_input_ids + req.output_ids
        nodes = list(handle.spans)
        for i, span in enumerate(row.prompt.spans):
            published, count = row.published[i], row.available(i, row_len)
            if count == published:
                continue
            cached, computed_start = row.cached[i], row.computed_start[i]
            cached_start = row.cached_start[i]
            value = torch.cat(
                [slots[cached_start : cached_start + cached], slots[computed_start : computed_start + count - cached]]
            ).to(torch.int64)
            key = ids[span.start : span.start + count]
            namespace = self._namespace(req, span)
            inserted = self.insert(
                InsertParams(key=RadixKey(key, namespace), value=value, chunked=chunked, priority=req.priority or 0)
            )
            match = self._match(key, namespace)
            if inserted.prefix_len > published:
                self.token_to_kv_pool_allocator.free(value[published : inserted.prefix_len])
                start, end = computed_start + published - cached, computed_start + inserted.prefix_len - cached
                self.req_to_token_pool.write(
                    (req.req_pool_idx, slice(start, end)),
                    match.device_indices[published : inserted.prefix_len].to(torch.int32),
                )
            row.published[i] = count
            nodes[i] = match.last_device_node
        req.last_node = LinkHandle(handle.chunks, tuple(nodes))
        self.inc_lock_ref(req.last_node)
        self.dec_lock_ref(handle)

    # Copies, of requests that do not attend to chunks in place

    def allocate_copy(self, req) -> None:
        """Put slots of the request's own in place of its chunks' into its row; what is to be copied is kept in `link`.

        Raises RuntimeError where memory does not suffice, as SGLang does for a batch: admission has made sure it does.
        """
        num_tokens = req.link.prompt.num_chunk_tokens
        entries = (req.req_pool_idx, slice(0, num_tokens))
        source = self.req_to_token_pool.req_to_token[entries].to(torch.int64, copy=True)
        slots = alloc_token_slots(self, num_tokens)
        self.req_to_token_pool.write(entries, slots.to(torch.int32))
        req.link.copy = ChunkCopy(source, slots)

    def end_copy(self, req) -> None:
        """The copying has been launched: what reuses the chunks' slots is launched later, so they need no lock."""
        req.link.copy.written = True
        chunks, req.last_node = req.last_node.chunks, LinkHandle((), req.last_node.spans)
        self.dec_lock_ref(LinkHandle(chunks, ()))

    # Locks

    def inc_lock_ref(self, node: TreeNode | LinkHandle) -> IncLockRefResult:
        if not isinstance(node, LinkHandle):
            return super().inc_lock_ref(node)
        return IncLockRefResult(delta=sum(RadixCache.inc_lock_ref(self, held).delta for part in node for held in part))

    def dec_lock_ref(self, node: TreeNode | LinkHandle, params: DecLockRefParams | None = None) -> DecLockRefResult:
        if not isinstance(node, LinkHandle):
            return super().dec_lock_ref(node, params)
        return DecLockRefResult(delta=sum(RadixCache.dec_lock_ref(self, held).delta for part in node for held in part))

    # Eviction

    def evict(self, params: EvictParams) -> EvictResult:
        start_time = time.perf_counter()
        num_evicted = 0
        while num_evicted < params.num_tokens:
            leaf = self._heap.pop(self.evictable_leaves)
            if leaf is None:
                if self.release_waiting_lock():
                    continue
                break
            self.token_to_kv_pool_allocator.free(leaf.value)
            num_evicted += len(leaf.value)
            self._delete_leaf(leaf)
            self._record_remove_event(leaf)
        self.update_eviction_metrics(num_evicted, start_time)
        return EvictResult(num_tokens_evicted=num_evicted)

    def _update_leaf_status(self, node: TreeNode) -> None:
        super()._update_leaf_status(node)
        if node in self.evictable_leaves:
            self._heap.push(node)

    # Events: SGLang's name a block by its tokens alone, which in our namespaces would name other KV.

    def _record_store_event(self, node: TreeNode) -> None:
        if not isinstance(node.key.extra_key, tuple):
            super()._record_store_event(node)

    def _record_remove_event(self, node: TreeNode) -> None:
        if not isinstance(node.key.extra_key, tuple):
            super()._record_remove_event(node)

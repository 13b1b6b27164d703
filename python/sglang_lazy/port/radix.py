"""Chunk-keyed KV cache: SGLang's radix tree, with namespaces for chunks and for the text after them.

Every slot of the pool is free, in exactly one tree node, or owned by one running request. The row of a linked request
lists the slots of shared nodes; those are neither counted nor freed with the request.
"""

import dataclasses
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence

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

from sglang_lazy.chunks.eviction import EvictionHeap
from sglang_lazy.core.prompt import ChunkRef, FillRow, Row


@dataclasses.dataclass(eq=False)
class ChunkNodes:
    """Where a linked request's chunks are: locked once, for the request while it waits, for its row, or for both.

    nodes: per chunk, the node at which it ends; None while it is missing.
    num_locks: how many of those hold them now.
    """

    nodes: list[TreeNode | None]
    num_locks: int = 0

    @property
    def complete(self) -> bool:
        return None not in self.nodes


@dataclasses.dataclass(eq=False)
class LinkHandle:
    """All tree nodes that a linked request or a fill holds: what SGLang locks and unlocks as its `last_node`.

    spans: per text span, the node where its cached part ends; of a fill, the same per chunk.
    num_locks: SGLang's locks on it. What it holds is locked once, while there is any.
    """

    chunks: ChunkNodes
    spans: list[TreeNode]
    num_locks: int = 0


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

    A request is linked if it has a `link` and internal if it has a `fill` (`scheduler.link`); all others are handled by
    the stock tree.
    `release_waiting_lock` frees memory that waiting requests hold, newest first; it returns False when none is left.
    `_chunk_ends` has the node at which each published chunk ends, by chunk key; the node has that key as `chunk_key`.
    """

    def __init__(self, params: CacheInitParams):
        self.release_waiting_lock: Callable[[], bool] = lambda: False
        super().__init__(params)

    def reset(self) -> None:
        self._heap = EvictionHeap(self.eviction_strategy.get_priority)
        self._blank = torch.empty(0, dtype=torch.int64, device=self.device)
        self._chunk_ends: dict[tuple, TreeNode] = {}
        super().reset()

    # Chunks

    def find_chunk(self, chunk: ChunkRef) -> TreeNode | None:
        """The node at which the used part of `chunk` ends, or None if it is not resident in full. Counts as a use."""
        if chunk.used == chunk.num_tokens and (node := self._chunk_ends.get(chunk.key)) is not None:
            node.last_access_time = time.monotonic()
            return node
        if not self._holds(chunk.tokens, chunk.used, chunk.namespace):
            return None
        return self._find(RadixKey(chunk.tokens, chunk.namespace, limit=chunk.used)).last_device_node

    def _holds(self, tokens: array, end: int, namespace: tuple) -> bool:
        """Whether the first `end` tokens are cached: `_find` tells it too, but splits a node wherever tokens differ."""
        node, start = self.root_node, 0
        while start < end:
            node = node.children.get(RadixKey(tokens[start : start + 1], namespace).child_key())
            if node is None:
                return False
            known = node.key.token_ids
            count = min(len(known), end - start)
            # The last one first: whatever differs mostly differs there, and the others need not be fetched.
            if known[count - 1] != tokens[start + count - 1] or known[:count] != tokens[start : start + count]:
                return False
            start += count
        return True

    def insert_chunk(self, chunk: ChunkRef, slots: torch.Tensor, priority: int = 0) -> InsertResult:
        """Make all of `chunk` resident, in `slots` (int64 [num_tokens]) but for those that the tree has already."""
        inserted = self.insert(InsertParams(RadixKey(chunk.tokens, chunk.namespace), slots, priority=priority))
        node = inserted.last_device_node
        node.chunk_key = chunk.key
        self._chunk_ends[chunk.key] = node
        return inserted

    def unlocked_size(self, nodes: Iterable[TreeNode]) -> int:
        """How many tokens locking `nodes` would take from what is evictable."""
        counted = set()
        for node in nodes:
            while node.lock_ref == 0 and node not in counted:  # whoever locks a node has locked all above it
                counted.add(node)
                node = node.parent
        return sum(len(node.key) for node in counted)

    def _find(self, key: RadixKey) -> MatchResult:
        """The longest beginning of `key` that is cached: its slots, and the node where it ends. Counts as a use."""
        return super().match_prefix(MatchPrefixParams(key))

    def _use(self, node: TreeNode) -> list[torch.Tensor]:
        """The slots from the beginning of its namespace to the end of a locked node, in pieces. Counts as a use."""
        pieces, now = [], time.monotonic()
        while node is not self.root_node:
            node.last_access_time = now
            pieces.append(node.value)
            node = node.parent
        return pieces[::-1]

    # Fills

    def _match_fill(self, req) -> MatchResult:
        """Lay out the row of a fill, and give the beginnings of its chunks that are cached as its prefix.

        Sets `req.fill.row` and permutes `req.full_untruncated_fill_ids` into row order. As SGLang does, the last token
        of each chunk is computed in any case.
        """
        pieces, nodes, cached = [], [], []
        for chunk in req.fill.chunks:
            key = RadixKey(chunk.tokens, chunk.namespace, limit=chunk.num_tokens - 1)
            if key.child_key() not in self.root_node.children:  # most have no beginning in common with another
                cached.append(0)
                continue
            found = self._find(key)
            cached.append(len(found.device_indices))
            pieces.append(found.device_indices)
            nodes.append(found.last_device_node)
        req.fill.row = FillRow(req.fill.chunks, cached)
        req.full_untruncated_fill_ids = req.fill.row.permuted(req.origin_input_ids)
        slots = torch.cat(pieces) if pieces else self._blank[:0]
        handle = LinkHandle(ChunkNodes([]), nodes)
        return MatchResult(device_indices=slots, last_device_node=handle, last_host_node=handle, best_match_node=handle)

    def publish_fill(self, req, slots: torch.Tensor) -> list[TreeNode]:
        """Give the chunks that a fill is about to complete to the tree, and lock them there until it ends.

        slots: int64, where its batch writes the tokens behind the fill's prefix.
        Returns, per chunk, the node at which it ends.

        Where the tree has other slots already, of a chunk that begins alike, those in `req.fill.duplicates` are still
        the fill's own: its batch writes to them.
        """
        fill = req.fill
        slots = torch.cat([req.prefix_indices, slots]) if len(req.prefix_indices) else slots
        nodes, duplicates = [], [self._blank[:0]]
        for i, chunk in enumerate(fill.chunks):
            pieces = [slots[start:end] for start, end in fill.row.windows(i)]
            value = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            inserted = self.insert_chunk(chunk, value, req.priority or 0)
            if inserted.prefix_len > fill.row.cached[i]:
                duplicates.append(value[fill.row.cached[i] : inserted.prefix_len])
            nodes.append(inserted.last_device_node)
        handle = LinkHandle(ChunkNodes([]), nodes)
        self.inc_lock_ref(handle)
        self.dec_lock_ref(req.last_node)
        req.last_node, req.cache_protected_len = handle, len(req.origin_input_ids)
        fill.duplicates = torch.cat(duplicates)
        return nodes

    # Linked requests

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if getattr(params.req, "link", None) is not None:
            return self._match_linked(params.req)
        if getattr(params.req, "fill", None) is not None:
            return self._match_fill(params.req)
        return super().match_prefix(params)

    def _match_linked(self, req) -> MatchResult:
        """Lay out the request's row by what is cached, and give its cached entries as the prefix.

        Sets `req.link.row` and permutes `req.full_untruncated_fill_ids` into row order. The request must be admitted.
        If chunks are still missing, its row gets all of them from `complete_row`.
        """
        link = req.link
        assert link.admitted, f"request {req.rid} was scheduled before its chunks"
        # No copy where there is no answer yet: SGLang's `_refresh_fill_ids` never appends to the prompt's own array.
        ids = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
        limit = req._compute_max_prefix_len(len(ids))
        if link.ready:
            pieces = [piece for node in link.chunks.nodes for piece in self._use(node)]
        else:
            pieces = [self._blank_slots(link.prompt.num_chunk_tokens)]
        last = link.prompt.spans[-1]
        spans, cached = [], []
        for span in link.prompt.spans:
            tokens = self._tokens(req, span.start, limit if span is last else span.end)
            found = self._find(RadixKey(tokens, self._namespace(req, span)))
            pieces.append(found.device_indices)
            spans.append(found.last_device_node)
            cached.append(len(found.device_indices))
        link.row = Row(link.prompt, cached, len(ids))
        req.full_untruncated_fill_ids = link.row.permuted(ids)
        if not req.retracted_stain:
            # SGLang counts the prefix beyond `already_computed` as cached: leave out what this request had computed.
            req.already_computed = link.num_fresh_tokens
        handle = LinkHandle(link.chunks, spans)
        slots = torch.cat(pieces) if link.ready or any(cached) else pieces[0]
        return MatchResult(device_indices=slots, last_device_node=handle, last_host_node=handle, best_match_node=handle)

    def _blank_slots(self, num_tokens: int) -> torch.Tensor:
        """Some slots, int64 [num_tokens], in the place of those that a row will have: to be read only."""
        if len(self._blank) < num_tokens:
            self._blank = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        return self._blank[:num_tokens]

    def complete_row(self, req, published: Mapping[tuple, TreeNode]) -> None:
        """Enter the chunks into the row that SGLang has assigned to a request, if it was matched with some missing.

        published: by key, where the chunks that its batch computes end. None may be missing besides.
        Of `req.prefix_indices` SGLang needs no more than the length from here on.
        """
        chunks = req.last_node.chunks
        if chunks.complete:
            return
        self.enter_published(chunks, req.link.prompt.chunks, published)
        assert chunks.complete, f"request {req.rid} was scheduled before its chunks"
        slots = torch.cat([piece for node in chunks.nodes for piece in self._use(node)])
        self.req_to_token_pool.write((req.req_pool_idx, slice(0, len(slots))), slots)

    @staticmethod
    def _tokens(req, start: int, end: int) -> array:
        """The tokens at positions [start, end) of the prompt and its answer."""
        answer_start = len(req.origin_input_ids)
        answer = req.output_ids[max(0, start - answer_start) : max(0, end - answer_start)]
        return req.origin_input_ids[start:end] + answer

    @staticmethod
    def _namespace(req, span) -> tuple | str | None:
        return req.extra_key if span.namespace is None else span.namespace

    def cache_unfinished_req(self, req, chunked: bool = False) -> None:
        linked = getattr(req, "link", None) is not None
        if not linked and getattr(req, "fill", None) is None:
            return super().cache_unfinished_req(req, chunked=chunked)
        row_len = len(req.get_fill_ids())
        if linked:
            self._publish(req, row_len, chunked)
            req.cache_protected_len = row_len
        if chunked:  # it goes on from here
            row = self.req_to_token_pool.req_to_token[req.req_pool_idx, :row_len]
            req.prefix_indices = row.to(torch.int64, copy=True)

    def cache_finished_req(self, req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        link, fill = getattr(req, "link", None), getattr(req, "fill", None)
        if link is None and fill is None:
            return super().cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=kv_len_to_handle)
        if link is not None and is_insert and not self.disable_finished_insert:
            self._publish(req, kv_len_to_handle, chunked=False)
        elif fill is not None and fill.duplicates is not None:
            self.token_to_kv_pool_allocator.free(fill.duplicates)
        else:
            owned = self.req_to_token_pool.req_to_token[req.req_pool_idx, req.cache_protected_len : kv_len_to_handle]
            self.token_to_kv_pool_allocator.free(owned)
        self.dec_lock_ref(req.last_node)
        if link is not None and link.copy is not None:
            self.token_to_kv_pool_allocator.free(link.copy.slots)
            link.copy = None

    def _publish(self, req, row_len: int, chunked: bool) -> None:
        """Give the text in the first `row_len` entries of the row to the tree, and lock it there.

        Where the tree got the same text from another request in the meantime, ours is freed and the row is rewritten
        with the tree's slots, so that afterwards every entry of those `row_len` belongs to the tree.
        """
        row, handle = req.link.row, req.last_node
        text_start = row.prompt.num_chunk_tokens
        text_slots = self.req_to_token_pool.req_to_token[req.req_pool_idx, text_start:row_len].to(torch.int64)
        for i, span in enumerate(row.prompt.spans):
            published, count = row.published[i], row.available(i, row_len)
            if count == published:
                continue
            cached, computed_start = row.cached[i], row.computed_start[i]
            value = text_slots[computed_start - text_start :][: count - cached]
            if cached:
                value = torch.cat([text_slots[row.cached_start[i] - text_start :][:cached], value])
            key = RadixKey(self._tokens(req, span.start, span.start + count), self._namespace(req, span))
            inserted = self.insert(InsertParams(key=key, value=value, chunked=chunked, priority=req.priority or 0))
            if inserted.prefix_len > published:
                self.token_to_kv_pool_allocator.free(value[published : inserted.prefix_len])
                start, end = computed_start + published - cached, computed_start + inserted.prefix_len - cached
                kept = self._find(key).device_indices[published : inserted.prefix_len]
                self.req_to_token_pool.write((req.req_pool_idx, slice(start, end)), kept)
            row.published[i] = count
            self.inc_lock_ref(inserted.last_device_node)
            self.dec_lock_ref(handle.spans[i])
            handle.spans[i] = inserted.last_device_node

    # Copies, of requests that do not attend to chunks in place

    def allocate_copy(self, req) -> None:
        """Put slots of the request's own in place of its chunks' into its row; what is to be copied is kept in `link`.

        Raises RuntimeError where memory does not suffice, as SGLang does for a batch: admission has made sure it does.
        """
        num_tokens = req.link.prompt.num_chunk_tokens
        entries = (req.req_pool_idx, slice(0, num_tokens))
        source = self.req_to_token_pool.req_to_token[entries].to(torch.int64, copy=True)
        slots = alloc_token_slots(self, num_tokens)
        self.req_to_token_pool.write(entries, slots)
        req.link.copy = ChunkCopy(source, slots)

    def end_copy(self, req) -> None:
        """The copying has been launched: what reuses the chunks' slots is launched later, so they need no lock."""
        req.link.copy.written = True
        self.unlock_chunks(req.last_node.chunks)
        req.last_node.chunks = ChunkNodes([], num_locks=1)

    # Locks

    def lock_chunks(self, chunks: ChunkNodes) -> int:
        """Lock them for one more holder; returns by how much that changes what is evictable."""
        chunks.num_locks += 1
        if chunks.num_locks > 1:
            return 0
        return sum(self.inc_lock_ref(node).delta for node in chunks.nodes if node is not None)

    def unlock_chunks(self, chunks: ChunkNodes) -> int:
        """Give one holder's lock back; returns the same."""
        chunks.num_locks -= 1
        if chunks.num_locks > 0:
            return 0
        return sum(self.dec_lock_ref(node).delta for node in chunks.nodes if node is not None)

    def enter_chunk(self, chunks: ChunkNodes, i: int, node: TreeNode) -> None:
        """Chunk `i`, which was missing, is at `node` now: lock it for whoever holds the others."""
        chunks.nodes[i] = node
        if chunks.num_locks:
            self.inc_lock_ref(node)

    def enter_published(
        self, chunks: ChunkNodes, refs: Sequence[ChunkRef], published: Mapping[tuple, TreeNode]
    ) -> None:
        """Enter those of the missing chunks `refs` that have been published, at a node by chunk key."""
        for i, chunk in enumerate(refs):
            if chunks.nodes[i] is None and (node := published.get(chunk.key)) is not None:
                self.enter_chunk(chunks, i, node if chunk.used == chunk.num_tokens else self.find_chunk(chunk))

    def inc_lock_ref(self, node: TreeNode | LinkHandle) -> IncLockRefResult:
        if not isinstance(node, LinkHandle):
            return super().inc_lock_ref(node)
        node.num_locks += 1
        if node.num_locks > 1:
            return IncLockRefResult(delta=0)
        delta = self.lock_chunks(node.chunks) + sum(self.inc_lock_ref(span).delta for span in node.spans)
        return IncLockRefResult(delta=delta)

    def dec_lock_ref(self, node: TreeNode | LinkHandle, params: DecLockRefParams | None = None) -> DecLockRefResult:
        if not isinstance(node, LinkHandle):
            return super().dec_lock_ref(node, params)
        node.num_locks -= 1
        if node.num_locks > 0:
            return DecLockRefResult(delta=0)
        delta = self.unlock_chunks(node.chunks) + sum(self.dec_lock_ref(span).delta for span in node.spans)
        return DecLockRefResult(delta=delta)

    # Eviction

    def evict(self, params: EvictParams) -> EvictResult:
        start_time = time.perf_counter()
        num_evicted, freed = 0, []
        while num_evicted < params.num_tokens:
            leaf = self._heap.pop(self.evictable_leaves)
            if leaf is None:
                if self.release_waiting_lock():
                    continue
                break
            freed.append(leaf.value)
            num_evicted += len(leaf.key)
            self._delete_leaf(leaf)
            self._chunk_ends.pop(getattr(leaf, "chunk_key", None), None)
            self._record_remove_event(leaf)
            leaf.value = None  # makes it `evicted` to whoever has found it before
        if freed:
            self.token_to_kv_pool_allocator.free(torch.cat(freed))
        self.update_eviction_metrics(num_evicted, start_time)
        return EvictResult(num_tokens_evicted=num_evicted)

    def _update_leaf_status(self, node: TreeNode) -> None:
        """A leaf that nobody holds may be evicted. SGLang looks for children with KV; here all of them have it."""
        if node.lock_ref or node.children:
            self.evictable_leaves.discard(node)
        else:
            self.evictable_leaves.add(node)
            self._heap.push(node)

    # Events: SGLang's name a block by its tokens alone, which in our namespaces would name other KV.

    def _record_store_event(self, node: TreeNode) -> None:
        if not isinstance(node.key.extra_key, tuple):
            super()._record_store_event(node)

    def _record_remove_event(self, node: TreeNode) -> None:
        if not isinstance(node.key.extra_key, tuple):
            super()._record_remove_event(node)

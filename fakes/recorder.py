"""Pools that remember what was computed into each slot, and find what the cache and running requests get wrong."""

import collections
import itertools
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.radix_cache import TreeNode

from fakes.pools import Pools
from fakes.requests import contents_of_chunks, positions_of
from sglang_lazy.chunks.store import PRIVATE_SEGMENT
from sglang_lazy.core.keys import Namespace, tokens_digest
from sglang_lazy.core.state import RowNodes, fill_of, linked

NOT_COMPUTED = "not computed"


class Slots(TokenToKVPoolAllocator):
    """SGLang's allocator, with what was computed into each slot since it was allocated."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.contents: dict[int, Any] = {}
        super().__init__(*args, **kwargs)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self.contents.update((slot, NOT_COMPUTED) for slot in slots.tolist())
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        for slot in free_index.tolist():
            assert self.contents.pop(slot, None), f"slot {slot} is freed, but was not in use"
        super().free(free_index)

    def clear(self) -> None:
        super().clear()
        self.contents.clear()

    def compute(self, slot: int, content: Any) -> None:
        assert self.contents[slot] == NOT_COMPUTED
        self.contents[slot] = content


class RecordingPools(Pools):
    """A forward pass writes `req.contents` of the tokens that it computes.

    waiting_locks: nodes that are locked on behalf of waiting requests, besides those of `holders` given to `check`.
    paths: what stands before the text of each namespace, as far as prompts have named it.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.waiting_locks: list[TreeNode] = []
        self.paths: dict[Namespace, tuple] = {}
        self._seen: list[Req] = []

    @property
    def running(self) -> list[Req]:
        """The requests that have rows."""
        self._seen = [req for req in self._seen if req.req_pool_idx is not None]
        return self._seen

    def new_slots(self, size: int, device: str) -> Slots:
        return Slots(size, torch.float32, device, None, need_sort=False)

    # Forward passes

    def forward(self, batch: ScheduleBatch) -> None:
        for req in batch.reqs:
            if req not in self._seen:
                self._seen.append(req)
                self._name_paths(req)
                if (fill := fill_of(req)) is not None:
                    req.contents = contents_of_chunks(fill.chunks)
            end = req.kv_committed_len
            start = len(req.prefix_indices) if batch.forward_mode.is_extend() else end - 1
            row = self.rows.req_to_token[req.req_pool_idx, start:end].tolist()
            for slot, position in zip(row, positions_of(req, start, end), strict=True):
                self.slots.compute(slot, req.contents[position])
        current = self.rows.segment_table.current
        if current is not None and current.rows and not any(fill_of(req) is not None for req in batch.reqs):
            positions = [positions_of(req, len(req.prefix_indices), req.kv_committed_len) for req in batch.reqs]
            assert current.q_positions.tolist() == [*itertools.chain(*positions)]
        self.check_row_contents()

    def copy_rotated(self, k_caches: Any, v_caches: Any, source, target, rotations, *_args: Any, **_kwargs: Any):
        pairs = zip(source.tolist(), target.tolist(), strict=True)
        for source_slot, slot in pairs:
            if slot:  # slot 0 is for trying the kernel
                self.slots.compute(slot, self.slots.contents[source_slot])

    def _name_paths(self, req: Req) -> None:
        """Record the path that each namespace of `req` stands for; two paths in one namespace fail."""
        state = linked(req)
        for span in () if state is None else state.prompt.spans:
            if span.namespace is not None:
                kind, extra_key, salt, path = req.contents[span.start]
                before = (extra_key, salt, path[:-1])
                assert kind == "text"
                assert self.paths.setdefault(span.namespace, before) == before

    # What must hold after every step

    def nodes(self) -> Iterator[tuple[TreeNode, Any, tuple[int, ...]]]:
        """All tree nodes with their namespace and the tokens before them in it."""
        stack = [(child, ()) for child in self.cache.root_node.children.values()]
        while stack:
            node, before = stack.pop()
            yield node, node.key.extra_key, before
            stack += [(child, before + tuple(node.key.token_ids)) for child in node.children.values()]

    def check(self, holders: Iterable[Req] = ()) -> None:
        """holders: waiting requests that have chunks locked."""
        self.check_slots()
        self.check_locks(holders)
        self.check_tree_contents()
        self.check_row_contents()
        self.check_segments()

    def check_slots(self) -> None:
        """Every slot is free, in exactly one tree node, or owned by one running request."""
        places = [*self.slots.free_pages.tolist(), *self.slots.release_pages.tolist()]
        for node, _, _ in self.nodes():
            assert len(node.value) == len(node.key)
            places += node.value.tolist()
        for req in self.running:
            row = self.rows.req_to_token[req.req_pool_idx]
            places += row[req.cache_protected_len : req.kv_committed_len].tolist()
            if (fill := fill_of(req)) is not None and fill.duplicates is not None:
                places += fill.duplicates.tolist()
            if (state := linked(req)) is not None and state.own is not None:
                places += state.own.slots.tolist()
        assert sorted(places) == list(range(1, self.slots.size + 1))

    def check_locks(self, holders: Iterable[Req]) -> None:
        """A node is locked once by each user at or below it; the sizes and the leaves say what the locks say.

        The chunks of a request are one user, whether it is admitted, runs, or both.
        """
        users = collections.Counter()
        rows = [req.last_node for req in self.running if isinstance(req.last_node, RowNodes)]
        held = [req.last_node for req in self.running if not isinstance(req.last_node, RowNodes)]
        held += [node for row in rows for node in row.spans]
        for chunks, num_locks in collections.Counter(
            [row.chunks for row in rows] + [linked(req).chunks for req in holders]
        ).items():
            assert chunks.num_locks == num_locks
            held += [node for node in chunks.nodes if node is not None]
        for node in held + self.waiting_locks:
            while node is not self.cache.root_node:
                users[node] += 1
                node = node.parent
        evictable = protected = 0
        leaves = set()
        for node, _, _ in self.nodes():
            assert node.lock_ref == users.pop(node, 0)
            if node.lock_ref:
                protected += len(node.key)
            else:
                evictable += len(node.key)
                if not node.children:
                    leaves.add(node)
        assert not users, "a request holds nodes that left the tree"
        assert (self.cache.evictable_size(), self.cache.protected_size()) == (evictable, protected)
        assert self.cache.evictable_leaves == leaves

    def check_tree_contents(self) -> None:
        """The slots of a node hold what its key and namespace promise to whoever matches it; chunks are found there."""
        ends = {}
        for node, namespace, before in self.nodes():
            tokens = before + tuple(node.key.token_ids)
            ends[namespace, tokens_digest(array("q", tokens))] = node
            for i, slot in enumerate(node.value.tolist(), len(before)):
                assert self.slots.contents[slot] == self._promise(namespace, tokens[: i + 1])
        for key, chunk in self.cache.store._resident.items():
            assert ends[key.namespace, key.tokens] is chunk.node

    def _promise(self, namespace: Any, tokens: tuple[int, ...]) -> tuple:
        if not isinstance(namespace, Namespace):
            return ("text", namespace, None, tokens)
        if namespace.is_chunk:
            return ("chunk", namespace.extra_key, namespace.cache_salt, tokens)
        extra_key, salt, path = self.paths[namespace]
        return ("text", extra_key, salt, path + tokens)

    def check_row_contents(self) -> None:
        """Every entry of a running request's row holds what its position demands."""
        for req in self.running:
            row = self.rows.req_to_token[req.req_pool_idx, : req.kv_committed_len].tolist()
            positions = positions_of(req, 0, req.kv_committed_len)
            assert [self.slots.contents.get(slot) for slot in row] == [req.contents[p] for p in positions]

    def check_segments(self) -> None:
        """Segments say where the keys of the row's beginning were rotated to; those of one id list the same slots."""
        table, slots_by_id = self.rows.segment_table, {}
        for req in self.running:
            state, index = linked(req), req.req_pool_idx
            count = int(table.num_segments[index])
            if state is None or not state.policy.in_place:
                assert count == 0
                continue
            columns = (table.ends, table.offsets, table.ids)
            segments = list(zip(*(column[index, :count].tolist() for column in columns), strict=True))
            start, row = 0, self.rows.req_to_token[index].tolist()
            for (end, offset, segment_id), chunk in zip(segments, state.prompt.chunks, strict=True):
                kept = [i for first, last in chunk.kept for i in range(first, last)]
                assert positions_of(req, start, end) == [offset + i for i in kept]
                assert [len(req.contents[offset + i][3]) - 1 for i in kept] == kept, "where each key was rotated to"
                if segment_id != PRIVATE_SEGMENT:
                    assert slots_by_id.setdefault(segment_id, row[start:end]) == row[start:end]
                start = end
            assert start == state.prompt.num_chunk_tokens

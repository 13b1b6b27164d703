"""Pools that remember what was computed into each slot, and find what the cache and running requests get wrong."""

import collections
import itertools
import zlib
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.radix_cache import TreeNode

from fakes import windows
from fakes.attention import attend
from fakes.pools import NUM_ROTATIONS, Pools
from fakes.requests import ADAPTERS, contents_of, contents_of_fill, kept_in, positions_of
from fakes.slots import NOT_COMPUTED, HybridSlots, Slots
from fakes.streams import LatePool, current_stream
from sglang_lazy.chunks.store import PRIVATE_SEGMENT
from sglang_lazy.core.keys import Namespace, tokens_digest
from sglang_lazy.core.state import RowNodes, fill_of, linked
from sglang_lazy.policies import get_policy
from sglang_lazy.port.cache.chunk_objects import ChunkObjects


class HostSlots(LatePool):
    """The host's memory, with what was copied into each slot."""

    def clear(self) -> None:
        super().clear()
        self.contents: dict[int, Any] = {}

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self.contents.update((slot, NOT_COMPUTED) for slot in slots.tolist())
        return slots

    def free(self, indices: torch.Tensor) -> int:
        for slot in indices.tolist():
            del self.contents[slot]
        return super().free(indices)

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend) -> None:
        pairs = list(zip(host_indices.tolist(), device_indices.tolist(), strict=True))
        copied = [device_pool.slots.contents[slot] for _, slot in pairs]
        assert NOT_COMPUTED not in copied, "copied to the host before it is computed"
        current_stream().do(lambda: self._back_up(device_pool, pairs, copied))
        super().backup_from_device_all_layer(device_pool, host_indices, device_indices, io_backend)

    def load_to_device_per_layer(self, device_pool, host_indices, device_indices, layer_id, io_backend) -> None:
        if layer_id == self.layer_num - 1:
            pairs = list(zip(host_indices.tolist(), device_indices.tolist(), strict=True))
            current_stream().do(lambda: self._load(device_pool, pairs))
        super().load_to_device_per_layer(device_pool, host_indices, device_indices, layer_id, io_backend)

    def _back_up(self, device_pool, pairs, copied) -> None:
        assert [device_pool.slots.contents[slot] for _, slot in pairs] == copied, "changed while it is copied"
        self.contents.update((host_slot, content) for (host_slot, _), content in zip(pairs, copied, strict=True))

    def _load(self, device_pool, pairs) -> None:
        for host_slot, slot in pairs:
            assert self.contents[host_slot] != NOT_COMPUTED, "loaded before it is on the host"
            device_pool.slots.compute(slot, self.contents[host_slot])


class RecordingObjects(ChunkObjects):
    """Stored chunks, with what was computed into them. Other KV than was written by a name counts as not computed."""

    written_as: ClassVar[dict[tuple[bytes, int], tuple[bytes, list]]] = {}

    def start_write(self, name: bytes, slots: torch.Tensor, what: Any) -> None:
        assert NOT_COMPUTED not in self._contents(slots.numpy()), "stored before it is computed"
        super().start_write(name, slots, what)

    def _write(self, name: bytes, index: int, slots: np.ndarray) -> bool:
        with self._memory() as allowed:
            if allowed:
                self.written_as[name, index] = self._kv(slots), self._contents(slots)
        return super()._write(name, index, slots)

    def _read(self, name: bytes, index: int, slots: np.ndarray) -> bool:
        found = super()._read(name, index, slots)
        with self._memory() as allowed:
            if found and allowed:
                kv, contents = self.written_as[name, index]
                if kv == self._kv(slots):
                    self.pool.contents.update(zip(slots.tolist(), contents, strict=True))
        return found

    def _kv(self, slots: np.ndarray) -> bytes:
        return self._rows[self._starts + slots].tobytes()

    def _contents(self, slots: np.ndarray) -> list:
        return [self.pool.contents[slot] for slot in slots.tolist()]


class RecordingPools(Pools):
    """A forward pass writes `req.contents` of the tokens that it computes.

    waiting_locks: nodes that are locked on behalf of waiting requests, besides those of `holders` given to `check`.
    paths: of each namespace of text, as far as prompts have named it: what stands before each of its ranges, and how
        long these are, but for the last.
    preambles: by what namespaces of chunks call them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.waiting_locks: list[TreeNode] = []
        self.paths: dict[Namespace, tuple] = {}
        self.preambles: dict[Any, tuple[int, ...]] = {None: ()}
        self._seen: list[Req] = []

    @property
    def running(self) -> list[Req]:
        """The requests that have rows."""
        self._seen = [req for req in self._seen if req.req_pool_idx is not None]
        return self._seen

    host_pool_class, objects_class = HostSlots, RecordingObjects

    def new_slots(self, size: int, window_size: int, device: str, kv: Any) -> Slots | HybridSlots:
        if window_size:
            return HybridSlots(size, window_size, 1, torch.float32, device, kv, need_sort=False)
        return Slots(size, torch.float32, device, kv, need_sort=False)

    @property
    def copying(self) -> bool:
        """Whether KV is on its way between device and host."""
        return self.has_tiers and bool(self.cache.ongoing_write_through or self.cache.ongoing_load_back)

    # Forward passes

    def forward(self, batch: ScheduleBatch) -> None:
        for req in batch.reqs:
            if req not in self._seen:
                self._seen.append(req)
                self._tell_contents(req)
                self._name_paths(req)
            end = req.kv_committed_len
            start = len(req.prefix_indices) if batch.forward_mode.is_extend() else end - 1
            row = self.rows.req_to_token[req.req_pool_idx, start:end].tolist()
            for slot, position in zip(row, positions_of(req, start, end), strict=True):
                self.slots.compute(slot, req.contents[position])
                self.keys[slot, 0, 0] = 1 + zlib.crc32(repr(req.contents[position]).encode()) % 97
        if batch.forward_mode.is_extend():
            attend(batch, self.rows.segment_table)
        self.check_row_contents()
        if self.window:
            windows.check_seen(self, batch)

    def _tell_contents(self, req: Req) -> None:
        """What is known of internal requests, and of those that wait for a probe, when they run."""
        state = linked(req)
        if (fill := fill_of(req)) is not None:
            req.contents = contents_of_fill(fill, req.lora_id)
            variant, preamble = fill.chunks[0].key.namespace.variant, tuple(fill.preamble)
            assert self.preambles.setdefault(variant, preamble) == preamble
            return
        if state is not None and state.probe is not None:
            req.layout, req.future = state.probe.parent.layout, state.probe.parent.future
        elif not (req.layout.chunks and get_policy(req.layout.link).probes):
            return
        recomputes = state is not None and state.recomputes
        req.contents = contents_of(req, kept_in(None if recomputes else state, req.layout))

    def copy_rotated(self, k_caches: Any, v_caches: Any, source, target, rotations, *_args: Any, **_kwargs: Any):
        pairs = zip(source.tolist(), target.tolist(), strict=True)
        for source_slot, slot in pairs:
            if slot:  # slot 0 is for trying the kernel
                self.slots.compute(slot, self.slots.contents[source_slot])

    def _name_paths(self, req: Req) -> None:
        """Record the path that each namespace of `req` stands for; two paths in one namespace fail."""
        state = linked(req)
        for span in () if state is None or state.recomputes else state.prompt.spans:
            if span.namespace is not None:
                runs = [
                    run.tolist() for run in np.split(span.positions, np.flatnonzero(np.diff(span.positions) > 1) + 1)
                ]
                kind, place, salt, path = req.contents[runs[-1][0]]
                ends = [0, *(run[-1] + 1 for run in runs)]
                between = [path[end : run[0]] for end, run in zip(ends, runs, strict=False)]
                lens = [len(run) for run in runs[:-1]]
                before = (place, salt, between, lens)
                known = self.paths.get(span.namespace, before)
                # Nothing stands behind the last kept token where another chunk does: then less is named.
                less, more = sorted((known, before), key=lambda path: len(path[3]))
                assert kind == "text" and less[:2] == more[:2]
                assert all(more[i][: len(less[i])] == less[i] for i in (2, 3))
                self.paths[span.namespace] = more

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
        held = self.check_locks(holders)
        if self.window:
            windows.check_slots(self)
            windows.check_locks(self, held)
        self.check_tree_contents()
        self.check_row_contents()
        self.check_segments()

    def check_slots(self) -> None:
        """Every slot is free, in exactly one tree node, or owned by one running request."""
        whole = self.slots.full_attn_allocator if self.window else self.slots
        places = [*whole.free_pages.tolist(), *whole.release_pages.tolist()]
        for node, _, _ in self.nodes():
            assert node.evicted or len(node.value) == len(node.key)
            places += [] if node.evicted else node.value.tolist()
        for req in self.running:
            row = self.rows.req_to_token[req.req_pool_idx]
            places += row[req.cache_protected_len : req.kv_committed_len].tolist()
            if (fill := fill_of(req)) is not None and fill.published:
                places += fill.duplicates.tolist()
            if (state := linked(req)) is not None and state.own is not None:
                places += state.own.slots.tolist()
        assert sorted(places) == list(range(1, whole.size + 1))
        if self.has_tiers:
            self.check_host_slots()

    def check_host_slots(self) -> None:
        """Every slot of the host is free or in one tree node; what is above a copy has one, and the same of slots."""
        pool, root = self.cache.token_to_kv_pool_host, self.cache.root_node
        places = torch.cat([pool.free_slots, *pool.release_slots]).tolist()
        places += [slot for fetch in self.cache.fetches for slot in fetch.slots.tolist()]
        leaves = set()
        for node, _, _ in self.nodes():
            assert not (node.evicted and not node.backuped), "a node without KV is in the tree"
            assert node.parent is root or node.evicted or not node.parent.evicted
            assert node.parent is root or node.parent.backuped or not node.backuped
            if node.backuped:
                assert len(node.host_value) == len(node.key)
                places += node.host_value.tolist()
            if node.evicted and not node.children:
                leaves.add(node)
        assert sorted(places) == list(range(pool.size))
        assert self.cache.evictable_host_leaves == leaves

    def check_locks(self, holders: Iterable[Req]) -> list[tuple[TreeNode, int]]:
        """A node is locked once by each user at or below it; the sizes and the leaves say what the locks say. Returns
        the nodes that are held, each with its spread.

        The chunks of a request are one user, whether it is admitted, runs, or both.
        """
        users = collections.Counter()
        rows = [req.last_node for req in self.running if isinstance(req.last_node, RowNodes)]
        held = [(req.last_node, 0) for req in self.running if not isinstance(req.last_node, RowNodes)]
        held += [pair for row in rows for pair in zip(row.spans, row.spreads or itertools.repeat(0), strict=False)]
        for chunks, num_locks in collections.Counter(
            [row.chunks for row in rows] + [linked(req).chunks for req in holders]
        ).items():
            assert chunks.num_locks == num_locks
            pairs = zip(chunks.nodes, chunks.spreads, strict=True)
            held += [(node, spread) for node, spread in pairs if node is not None]
        if self.has_tiers:
            held += [(node, 0) for node in self.cache.ongoing_load_back.values()]
            held += [(node, 0) for node, _, _ in self.cache.ongoing_write_through.values()]
        if self.cache.admission is not None:
            held += [(chunk.node, 0) for chunk in self.cache.admission.pins._chunks.values()]
        held += [(node, 0) for node in self.waiting_locks]
        assert self.cache.num_locks == sum(node is not self.cache.root_node for node, _ in held)
        for node, _ in held:
            while node is not self.cache.root_node:
                users[node] += 1
                node = node.parent
        evictable = protected = 0
        leaves = set()
        for node, _, _ in self.nodes():
            assert node.lock_ref == users.pop(node, 0)
            if node.lock_ref:
                protected += len(node.key)
            elif not node.evicted:
                evictable += len(node.key)
                if all(child.evicted for child in node.children.values()):
                    leaves.add(node)
        assert not users, "a request holds nodes that left the tree"
        assert (self.cache.evictable_size(), self.cache.protected_size()) == (evictable, protected)
        assert self.cache.evictable_leaves == leaves
        return held

    def check_tree_contents(self) -> None:
        """The slots of a node hold what its key and namespace promise to whoever matches it; chunks are found there."""
        ends = {}
        for node, namespace, before in self.nodes():
            tokens = before + tuple(node.key.token_ids)
            ends[namespace, tokens_digest(array("q", tokens))] = node
            promises = [self._promise(namespace, tokens[: i + 1]) for i in range(len(before), len(tokens))]
            if not node.evicted:
                contents = [self.slots.contents[slot] for slot in node.value.tolist()]
                assert all(pair[0] == pair[1] for pair in zip(contents, promises, strict=True)) or (
                    set(contents) == {NOT_COMPUTED} and self.cache.loading(node)
                )
            if node.backuped:
                copies = [self.cache.token_to_kv_pool_host.contents[slot] for slot in node.host_value.tolist()]
                assert copies == promises or (
                    set(copies) == {NOT_COMPUTED} and node.write_through_pending_id is not None
                )
        for key, chunk in self.cache.store._cached.items():
            assert ends[key.namespace, key.tokens] is chunk.node

    def _promise(self, namespace: Any, tokens: tuple[int, ...]) -> tuple:
        if not isinstance(namespace, Namespace):
            adapter = next((one for one in ADAPTERS if (namespace or "").endswith(one)), None)
            return ("text", (namespace, adapter), None, tokens)
        if namespace.kind == "chunk":
            place = (namespace.extra_key, namespace.adapter)
            return ("chunk", place, namespace.cache_salt, (self.preambles[namespace.variant], tokens))
        place, salt, between, lens = self.paths[namespace]
        path = ()
        for fixed, count in itertools.zip_longest(between, lens, fillvalue=len(tokens)):
            if tokens:
                path += fixed + tokens[:count]
                tokens = tokens[count:]
        return ("text", place, salt, path)

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
            if state is None or not state.policy.in_place or state.recomputes:
                assert count == 0
                continue
            columns = (table.ends, table.offsets, table.ids)
            segments = list(zip(*(column[index, :count].tolist() for column in columns), strict=True))
            start, row = 0, self.rows.req_to_token[index].tolist()
            for (end, offset, segment_id), chunk in zip(segments, state.prompt.chunks, strict=True):
                kept = [i for first, last in chunk.kept for i in range(first, last)]
                positions = positions_of(req, start, end)
                assert positions == [chunk.start + i for i in kept]
                rotated_to = [sum(map(len, req.contents[position][3])) - 1 for position in positions]
                assert [(offset + i) % NUM_ROTATIONS for i in rotated_to] == positions, "where each key was rotated to"
                if segment_id != PRIVATE_SEGMENT:
                    assert slots_by_id.setdefault(segment_id, row[start:end]) == row[start:end]
                start = end
            assert start == state.prompt.num_chunk_tokens

"""Pools that remember what was computed into each slot, and find what the cache and running requests get wrong."""

import itertools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from fakes import invariants, streams, windows
from fakes.attention import attend
from fakes.late_copies import LateCopier
from fakes.pools import Pools
from fakes.requests import ADAPTERS, contents_of, contents_of_fill, kept_in, positions_of, without_states
from fakes.slots import HybridSlots, Slots
from fakes.tiers import HostSlots, RecordingCopier, RecordingObjects
from sglang_lazy.attention.table import table_of
from sglang_lazy.cache.host_memory import CpuCopier, HostMemory
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.transfers import Transfers
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.state import fill_of, linked
from sglang_lazy.policies import get_policy


class RecordingPools(Pools):
    """A forward pass writes `req.contents` of the tokens that it computes.

    waiting_locks: nodes of our tree that are locked for waiting requests, besides those of `holders` given to `check`.
    paths: of each namespace of text, as far as prompts have named it: what stands before each of its ranges, and how
        long these are, but for the last.
    preambles: by what namespaces of chunks call them.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.waiting_locks: list[Node] = []
        self.paths: dict[Namespace, tuple] = {}
        self.preambles: dict[Any, tuple[int, ...]] = {None: ()}
        self._seen: list[Req] = []

    @property
    def running(self) -> list[Req]:
        """The requests that have rows."""
        self._seen = [req for req in self._seen if req.kv.holds_kv]
        return self._seen

    objects_class = RecordingObjects

    def new_transfers(self, memory: HostMemory, states: HostMemory | None = None) -> Transfers:
        memory.slots = HostSlots(memory.slots.size)
        state_copies = None if states is None else LateCopier(CpuCopier(states), states)
        return Transfers(memory, RecordingCopier(memory, self.chunk_slots), streams, states, state_copies)

    def new_slots(self, size: int, window_size: int, device: str, kv: Any) -> Slots | HybridSlots:
        if window_size:
            return HybridSlots(size, window_size, 1, torch.float32, device, kv, need_sort=False)
        return Slots(size, torch.float32, device, kv, need_sort=False)

    @property
    def copying(self) -> bool:
        """Whether KV is on its way between device and host."""
        return self.cache.is_copying

    # Forward passes

    def forward(self, batch: ScheduleBatch) -> None:
        for req in batch.reqs:
            if req not in self._seen:
                self._seen.append(req)
                self._tell_contents(req)
                self._name_paths(req)
            end = req.kv.kv_committed_len
            start = req.prefix_len if batch.forward_mode.is_extend() else end - 1
            row = self.rows.req_to_token[req.kv.req_pool_idx, start:end].tolist()
            for slot, position in zip(row, positions_of(req, start, end), strict=True):
                self.slots.compute(slot, req.contents[position])
                self.keys[slot, 0, 0] = 1 + zlib.crc32(repr(req.contents[position]).encode()) % 97
        if batch.forward_mode.is_extend():
            attend(batch, table_of(self.rows))
        invariants.check_row_contents(self)
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
        elif not (req.layout.chunks and (policy := get_policy(req.layout.link)).probes):
            if req.layout.chunks and self.cache.store.states is not None:
                kept = policy.kept(req.layout, req.origin_input_ids)
                req.contents = contents_of(req, without_states(req, kept))
            return
        recomputes = state is not None and state.recomputes
        req.contents = contents_of(req, kept_in(None if recomputes else state, req.layout))

    def copy_rotated(self, caches: Any, source, target, rotations):
        pairs = zip(source.tolist(), target.tolist(), strict=True)
        for source_slot, slot in pairs:
            if slot:  # slot 0 is for trying the kernel
                self.slots.compute(slot, self.slots.contents[source_slot])

    def _name_paths(self, req: Req) -> None:
        """Record the path that each namespace of `req` stands for; two paths in one namespace fail."""
        state = linked(req)
        for span in () if state is None or state.recomputes else state.prompt.spans:
            if span.namespace.variant is not None:
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

    # What must hold after every step, and what it is held against

    def check(self, holders: Iterable[Req] = ()) -> None:
        """holders: waiting requests that have chunks locked."""
        invariants.check(self, holders)

    def nodes(self) -> Iterator[tuple[Node, Any, tuple[int, ...]]]:
        """All nodes of our tree with their namespace and the tokens before them in it."""
        stack = [(child, ()) for child in self.cache.tree.root.children.values()]
        while stack:
            node, before = stack.pop()
            yield node, node.namespace, before
            stack += [(child, before + tuple(node.tokens)) for child in node.children.values()]

    def plain_nodes(self) -> Iterator[tuple[Any, str | None, str | None, tuple[int, ...]]]:
        """All nodes of SGLang's tree with their key and salt, and the tokens before them."""
        stack = [(child, ()) for child in self.cache.plain.tree_core.root_node.children.values()]
        while stack:
            node, before = stack.pop()
            yield node, node.key.extra_key, node.key.cache_salt, before
            stack += [(child, before + tuple(node.key)) for child in node.children.values()]

    def promise(self, namespace: Namespace, tokens: tuple[int, ...]) -> tuple:
        """What is in the slot of the last of `tokens`, all that `namespace` has up to there."""
        place, salt = (namespace.extra_key, namespace.adapter), namespace.cache_salt
        if namespace.kind == "chunk":
            return ("chunk", place, salt, (self.preambles[namespace.variant], tokens))
        if namespace.variant is None:
            return ("text", place, salt, tokens)
        known_place, known_salt, between, lens = self.paths[namespace]
        assert (known_place, known_salt) == (place, salt)
        path = ()
        for fixed, count in itertools.zip_longest(between, lens, fillvalue=len(tokens)):
            if tokens:
                path += fixed + tokens[:count]
                tokens = tokens[count:]
        return ("text", place, salt, path)

    def plain_promise(self, extra_key: str | None, cache_salt: str | None, tokens: tuple[int, ...]) -> tuple:
        """The same of SGLang's tree, where adapters have no name of their own."""
        adapter = next((one for one in ADAPTERS if (extra_key or "").endswith(one)), None)
        return ("text", (extra_key, adapter), cache_salt, tokens)

"""The chunk store: states, locks and tiers of chunks."""

import enum
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from sglang_lazy.cache.device import Device
from sglang_lazy.cache.host import HostKV
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.parts import Watcher
from sglang_lazy.cache.states import States
from sglang_lazy.cache.tree import Added, RadixTree
from sglang_lazy.cache.windows import Windows
from sglang_lazy.chunks.catalog import CachedChunk, Catalog, tenant_of
from sglang_lazy.chunks.counts import Counts
from sglang_lazy.chunks.deletions import Deletions
from sglang_lazy.chunks.reports import state_of
from sglang_lazy.core.device import to_device
from sglang_lazy.core.keys import ChunkKey, of_chunks
from sglang_lazy.core.prompt import ChunkSlice, LinkedPrompt
from sglang_lazy.core.remembered import Remembered
from sglang_lazy.core.state import ChunkNodes

PRIVATE_SEGMENT = -1
"""Segment id of KV that is not known to be shared with other requests."""
SEGMENT_IDS = 1 << 24
"""The bytes that segment ids may take: with policies that choose tokens for each prompt, they would grow for ever."""


class ChunkState(enum.Enum):
    """Where the KV of a chunk is.

    MISSING: nowhere. PENDING: a producer will compute it. FETCHING: being read from storage. HOST: in host memory.
    LOADING: being copied from there to the device. RESIDENT: on the device.

    Any pass launched from now on can attend to a chunk that is LOADING or RESIDENT.
    """

    MISSING = enum.auto()
    PENDING = enum.auto()
    FETCHING = enum.auto()
    HOST = enum.auto()
    LOADING = enum.auto()
    RESIDENT = enum.auto()


class Storage(Protocol):
    """The tier below the host."""

    def fetch(self, chunk: ChunkSlice) -> bool:
        """Start fetching a chunk that is not cached; returns whether it is on its way to the host."""

    def back_up(self, nodes: Iterable[Node]) -> None:
        """Store the chunks at `nodes` that the host has and storage does not."""


class ChunkStore(Watcher):
    """Chunks by key, over a tree that owns their KV.

    device: the pool of the tree.  windows: the part of the tree that holds window KV; None if all layers share a pool.
    states: the part that holds states of recurrent layers; None if there are none.
    host: the tree's host tier.  storage: the tier below; only with `host`.
    draft_token_bytes: what the model that drafts keeps of a token of a chunk; 0 without one.
    pending: what computes each pending chunk, by key; maintained by the producer.
    fetching: the chunks being fetched from storage, by key; maintained by `storage`.
    """

    def __init__(self, tree: RadixTree, device: Device, windows: Windows | None = None, states: States | None = None):
        self.tree, self.device, self.windows, self.states = tree, device, windows, states
        self.host: HostKV | None = None
        self.storage: Storage | None = None
        self.draft_token_bytes = 0
        self.pending: dict[ChunkKey, Any] = {}
        self.fetching: dict[ChunkKey, Any] = {}
        self.counts = Counts()
        self._cached: dict[ChunkKey, CachedChunk] = {}
        self._odd_ids = itertools.count(1, 2)
        tree.watcher = self
        self.reset()

    def reset(self) -> None:
        """Forget all chunks: the tree has been emptied."""
        for chunk in self._cached.values():
            chunk.node = None
            self.counts.hits_per_chunk.observe(chunk.hits)
        self._cached = {}
        self._by_node: dict[int, CachedChunk] = {}
        # By a chunk's serial number and the ranges kept of it, if these are not its beginning.
        self._segment_ids = Remembered[tuple[int, tuple], int](SEGMENT_IDS)
        self.catalog = Catalog(self._cached, lambda chunk: state_of(self, chunk))
        self.deletions = Deletions(self)

    # Chunks

    def state(self, chunk: ChunkSlice) -> ChunkState:
        """The state of the needed part of a chunk."""
        node = self.find(chunk)
        if node is None and chunk.key in self.fetching:
            return ChunkState.FETCHING
        if node is None:
            return ChunkState.PENDING if chunk.key in self.pending else ChunkState.MISSING
        return self.state_at(node)

    def state_at(self, node: Node) -> ChunkState:
        """The state of the KV up to `node`."""
        if node.slots is None:
            return ChunkState.HOST
        loading = self.host is not None and self.host.loading(node)
        return ChunkState.LOADING if loading else ChunkState.RESIDENT

    def find(self, chunk: ChunkSlice) -> Node | None:
        """The node where the needed part of `chunk` ends, None if it is not cached.

        A known chunk is found by its key, without reading its tokens or walking the tree. A chunk's beginning is found
        by comparing tokens. So is a chunk that begins a longer one, and from then on it is known.
        """
        cached = self._cached.get(chunk.key)
        is_whole = chunk.num_needed == chunk.num_tokens
        if cached is not None and is_whole:
            node = cached.node
        else:
            node = self.tree.end_of(chunk.tokens[: chunk.num_needed], chunk.key.namespace)
        if node is None or not self.tree.reads(node, chunk.spread):
            return None
        if cached is None and is_whole:
            self.adopt(chunk, node)
        return node

    def is_at(self, chunk: ChunkSlice, node: Node) -> bool:
        """Whether the needed part of `chunk` is still cached at `node`, where it was found."""
        return (node.slots is not None or node.host is not None) and self.tree.reads(node, chunk.spread)

    def insert(self, chunk: ChunkSlice, slots: torch.Tensor, priority: int = 0) -> Added:
        """Make all of `chunk`, whose KV is about to be computed, resident in `slots` (int64 [num_tokens]).

        Tokens that the tree has already keep the tree's slots.
        """
        added = self.tree.add(chunk.tokens, chunk.key.namespace, slots, priority, 0)
        self.adopt(chunk, added.node)
        return added

    def adopt(self, chunk: ChunkSlice, node: Node) -> CachedChunk:
        """Register a chunk that is in the tree and ends at `node`."""
        cached = self._cached.get(chunk.key)
        if cached is None:
            cached = self.catalog.add(chunk.key, node, chunk.num_tokens, time.time())
            self._cached[chunk.key] = self._by_node[node.id] = cached
        return cached

    def knows(self, key: ChunkKey) -> bool:
        """Whether the chunk is cached."""
        return key in self._cached

    def chunk_at(self, node: Node) -> CachedChunk | None:
        """The chunk that ends at `node`, None if none does."""
        return self._by_node.get(node.id)

    def slots_of(self, chunk: ChunkSlice, node: Node) -> list[torch.Tensor]:
        """The slots of the kept ranges of `chunk`, in pieces.  node: locked, where its needed part ends."""
        pieces = self.tree.slots_to(node)
        if chunk.num_kept == chunk.num_needed:
            return pieces
        slots = torch.cat(pieces)
        if len(chunk.kept) == 1:
            return [slots[slice(*chunk.kept[0])]]
        return [slots[to_device(chunk.indices.astype(np.int64), slots.device)]]

    def segment_id(self, chunk: ChunkSlice, node: Node) -> int:
        """An id that two segments share if and only if they list the same slots; see `plan_decode`. It recurs only
        after 2**30 others, when no row with it is left.

        PRIVATE_SEGMENT if that is not known, as for single tokens of a chunk that is not cached in full.

        node: locked, where its needed part ends.
        """
        if chunk.num_kept == chunk.num_needed:  # all slots up to the node
            return 2 * node.id % 2**31
        if (cached := self._cached.get(chunk.key)) is None:
            return PRIVATE_SEGMENT
        key = cached.serial, chunk.kept
        segment_id = self._segment_ids.get(key)
        if segment_id is None:
            segment_id = next(self._odd_ids) % 2**31
            self._segment_ids.put(key, segment_id)
        return segment_id

    def keep_scores(self, chunk: ChunkSlice, scores: np.ndarray) -> None:
        """Keep a chunk's scores, float32, one for each token, as long as it is cached."""
        cached = self._cached.get(chunk.key)
        if cached is not None and len(scores) == chunk.num_tokens:
            cached.scores = scores

    def scores(self, chunk: ChunkSlice) -> np.ndarray | None:
        """The scores of a chunk's kept tokens, or None."""
        cached = self._cached.get(chunk.key)
        if cached is None or cached.scores is None:
            return None
        return cached.scores[chunk.indices]

    # Reports

    def count_use(self, prompt: LinkedPrompt, reused: Sequence[bool], unused_hits: int) -> None:
        """Count a prompt that begins to run.

        reused: per slice, whether the prompt found it cached.  unused_hits: a bit mask of the unkept chunks found, too.
        """
        now, num_tokens = time.time(), 0
        for chunk, hit in zip(prompt.chunks, reused, strict=True):
            cached = self._cached.get(chunk.key)
            if cached is not None:
                cached.hits += hit
                cached.last_use = now
            num_tokens += chunk.num_kept if hit else 0
        for chunk in prompt.unkept:
            if (cached := self._cached.get(chunk.key)) is not None:
                cached.hits += unused_hits >> chunk.index & 1
                cached.last_use = now
        self.counts.num_references += len(prompt.chunks) + len(prompt.unkept)
        self.counts.num_hits += sum(reused) + unused_hits.bit_count()
        self.counts.num_reused_tokens += num_tokens

    # Locks

    def lock_chunks(self, chunks: ChunkNodes) -> int:
        """Lock `chunks` for one more holder; returns the change in the number of evictable tokens."""
        chunks.num_locks += 1
        if chunks.num_locks > 1:
            return 0
        return sum(self.tree.lock(*found) for found in chunks.found)

    def unlock_chunks(self, chunks: ChunkNodes) -> int:
        """Release one holder's lock; returns the same."""
        chunks.num_locks -= 1
        if chunks.num_locks > 0:
            return 0
        return sum(self.tree.unlock(*found) for found in chunks.found)

    def enter(self, chunks: ChunkNodes, i: int, node: Node) -> None:
        """Set the node of slice `i`, which was missing, and lock it for whoever holds the others."""
        chunks.nodes[i] = node
        if chunks.num_locks:
            self.tree.lock(node, chunks.spreads[i])

    def enter_cached(self, chunks: ChunkNodes, nodes: Sequence[Node | None]) -> list[int]:
        """Enter the missing slices that are cached; returns the indices of those that are loaded from the host.

        Slices on the host for which there is no memory stay missing.

        nodes: per slice, the node where it is cached, or None.
        """
        new = [(i, node) for i, node in enumerate(nodes) if node is not None and chunks.nodes[i] is None]
        on_host = [(i, node) for i, node in new if node.slots is None]
        for i, node in new:
            if node.slots is not None:
                self.enter(chunks, i, node)
        if on_host:  # last, since loading evicts
            self.load([node for _, node in on_host])
        for i, node in on_host:
            if node.slots is not None or self.load([node]):  # if not all fit, as many as do
                self.enter(chunks, i, node)
        return [i for i, _ in on_host if chunks.nodes[i] is not None]

    def enter_published(
        self, chunks: ChunkNodes, slices: Sequence[ChunkSlice], published: Mapping[ChunkKey, Node]
    ) -> None:
        """Enter those of the missing `slices` that have been published.  published: nodes by chunk key."""
        for i, chunk in enumerate(slices):
            if chunks.nodes[i] is None and (node := published.get(chunk.key)) is not None:
                end = node if chunk.num_needed == chunk.num_tokens else self.find(chunk)
                assert end is not None, "it has just been published"
                self.enter(chunks, i, end)

    def unlocked_size(self, nodes: Iterable[Node]) -> int:
        """How many free or evictable tokens it would take to lock `nodes` and load those on the host."""
        counted = set()
        for node in nodes:
            while not (node.locks or node.is_root) and node not in counted:  # a locked node's ancestors are locked
                counted.add(node)
                node = node.parent
        return sum(map(len, counted))

    # Tiers

    def load(self, nodes: Iterable[Node]) -> bool:
        """Load nodes that are only on the host, as `HostKV.load` does."""
        return self.host is not None and self.host.load(nodes)

    def fetch(self, chunk: ChunkSlice) -> bool:
        """Start fetching a chunk that is not cached from storage; returns whether it is on its way to the host."""
        return self.storage is not None and self.storage.fetch(chunk)

    def back_up(self, nodes: Iterable[Node]) -> None:
        """Copy to the tiers below what their write policies want of `nodes`, whose KV has been launched."""
        if self.host is None:
            return
        nodes = list(nodes)
        self.host.back_up(nodes)
        if self.storage is not None:
            self.storage.back_up(nodes)

    # What the tree tells

    def evicted(self, node: Node) -> None:
        if of_chunks(node.namespace):
            self.counts.evicted(tenant_of(node.namespace), node.id in self._by_node, len(node))

    def gone(self, node: Node) -> None:
        self.forget(node)

    def forget(self, node: Node) -> None:
        """Forget the chunk that ends at `node`, if any: the node has left the tree or the chunk is deleted."""
        chunk = self._by_node.pop(node.id, None)
        if chunk is not None:
            del self._cached[chunk.key]
            chunk.node = None
            self.catalog.remove(chunk)
            self.counts.hits_per_chunk.observe(chunk.hits)

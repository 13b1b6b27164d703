"""Chunks in one of SGLang's storage backends, the tier below the host, under names that cover all their KV depends on.

SGLang's own storage of the tree stays off. At page size 1 it stores one object per token, and names it by tokens only,
so it would mix up weights, dtypes and namespaces.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_lazy.chunks.store import CachedChunk
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.port.cache.backends import TensorBackend
from sglang_lazy.port.cache.calls import Calls, Ended
from sglang_lazy.port.cache.chunk_objects import ChunkObjects
from sglang_lazy.port.cache.hiradix import LazyHiRadixCache
from sglang_lazy.port.cache.tier_report import StorageReport

logger = logging.getLogger(__name__)


class Fetch(NamedTuple):
    """The read of a chunk from storage.

    slots: of the host pool, where its KV goes.  asked_at: when the read was requested.  patience: how many seconds
    requests wait for it.
    """

    chunk: ChunkSlice
    slots: torch.Tensor
    asked_at: float
    patience: float


class StoredHiRadixCache(LazyHiRadixCache):
    """The host tier with storage below it: chunks copied to the host are stored as well, and those found in no other
    tier are fetched from storage.

    `--hicache-storage-prefetch-policy` determines how long requests wait for a chunk, as in SGLang. A chunk that
    arrives later is put on the host if it is still missing there.

    clock: returns seconds.
    """

    objects_class = ChunkObjects
    objects: ChunkObjects | None = None
    report: StorageReport
    clock = staticmethod(time.monotonic)

    def connect(
        self, backend: TensorBackend, identity: Callable[[str | None], bytes | None], report: StorageReport
    ) -> None:
        """Start using a backend.

        identity: returns a digest of the weights that KV depends on: the model's for None, else those of the adapter
            with this id; None if it is not loaded. Called again after each flush. Hashing the model reads all its
            weights: see `identify`.
        """
        self._backend, self._identity, self.report = backend, identity, report
        self.objects = self.objects_class(backend, self.token_to_kv_pool_host)
        self._identified.clear()
        self.identify()

    def identify(self) -> None:
        """Hash the model, unless that has been done since the last flush."""
        if self.objects is not None and None not in self._identified:
            self._identified[None] = self._identity(None)

    def mix_weights(self) -> None:
        """Store and fetch nothing until the next flush: the cache may have KV of other weights than the model's."""
        self._identified.clear()
        self._identified[None] = None

    def reset(self) -> None:
        if self.objects is not None:
            self._drop_reads(self.objects)
            self._settle(self.objects)
        self._late: dict[ChunkKey, Fetch] = {}
        self._num_writing = self._num_fetching = 0  # tokens
        self._behind = False
        self._identified: dict[str | None, bytes | None] = {}
        super().reset()

    def _drop_reads(self, objects: ChunkObjects) -> None:
        """Forget the reads in progress."""
        if self._num_fetching:
            objects.drop_reads()
        for fetch in self.fetches:
            self.token_to_kv_pool_host.free(fetch.slots)
        self.store.fetching.clear()
        self._late.clear()
        self._num_fetching, self._behind = 0, False

    def _settle(self, objects: ChunkObjects) -> bool:
        """Finish the writes in progress, for as long as the backend makes progress, and forget the others. Returns
        whether there were no others."""
        settled = torch.tensor(objects.written.settle(self.prefetch_timeout_config.max), dtype=torch.int64)
        self._all_reduce_attn_groups(settled, torch.distributed.ReduceOp.MIN)
        self._take_written(objects)
        if settled:
            return True
        for _, path, num_tokens in (lost := objects.drop_writes()):
            self._let_go(path, num_tokens)
        self.report.unstored(len(lost))
        logger.error("sglang-lazy: the storage backend does not answer; %d chunks are not stored", len(lost))
        return False

    def detach_storage_backend(self) -> tuple[bool, str]:
        """Use storage no more; returns whether that succeeded, and a message, as SGLang does. No request may run."""
        if (objects := self.objects) is None:
            return True, "there was no storage"
        self._drop_reads(objects)
        self._settle(objects)
        self.objects = None
        objects.stop()
        if hasattr(self._backend.backend, "close"):
            self._backend.backend.close()
        return True, "chunks are neither stored nor fetched until the server is started again"

    def clear_storage_backend(self) -> bool:
        """Delete all that is in storage; returns whether that succeeded on all tensor-parallel ranks. Reads in progress
        find nothing. Chunks that other tiers have stay there, and are stored when they are used again."""
        if (objects := self.objects) is None or not self._backend.can_clear:
            return False
        self._drop_reads(objects)
        objects.written.cancel()
        settled, cleared = self._settle(objects), self._backend.clear()
        self._barrier_attn_groups()
        # Another rank may have deleted a file first.
        done = torch.tensor(settled and (cleared or self._backend.clear()), dtype=torch.int64)
        self._all_reduce_attn_groups(done, torch.distributed.ReduceOp.MIN)
        for chunk in self.store.catalog:
            chunk.stored = None
        return bool(done)

    @property
    def storage_name(self) -> str:
        """The name of the backend in SGLang's reports."""
        return type(self._backend.backend).__name__

    # From storage

    def fetch(self, chunk: ChunkSlice) -> bool:
        if self.objects is None:
            return False
        if chunk.key in self.store.fetching or chunk.key in self._late:
            return True
        if self._behind:
            return False
        name = self._name(chunk.key)
        slots = None if name is None else self._host_slots(chunk.num_tokens)
        if name is None or slots is None:
            return False
        self._num_fetching += len(slots)
        self.store.fetching[chunk.key] = Fetch(chunk, slots, self.clock(), self._patience())
        self.objects.start_read(name, slots, chunk.key)
        return True

    def _patience(self) -> float:
        """How many seconds requests wait for a chunk requested now, which is read after those requested before."""
        limits = self.prefetch_timeout_config
        linear = min(limits.max, limits.base + limits.per_ki_token * self._num_fetching / 1024)
        return {"best_effort": 0.0, "timeout": linear, "wait_complete": math.inf}[self.prefetch_stop_policy]

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.objects is None:
            return
        if self._num_writing:
            self._take_written(self.objects)
        if self.store.fetching or self._late:
            for call in self._ended(self.objects.read):
                fetch = self._late.pop(call.what, None) or self.store.fetching.pop(call.what)
                self._end_fetch(fetch, call)
        if self.store.fetching:
            self._stop_waiting(self.objects)
        if self._behind:
            can_read = torch.tensor(self.objects.read.can_run, dtype=torch.int64)
            self._all_reduce_attn_groups(can_read, torch.distributed.ReduceOp.MIN)
            self._behind = not can_read

    def _end_fetch(self, fetch: Fetch, call: Ended) -> None:
        self._num_fetching -= len(fetch.slots)
        wait = self.clock() - fetch.asked_at
        if call.succeeded:
            self.report.fetched(len(fetch.slots), call.seconds, wait)
        else:
            self.report.missed(wait)
        if not call.succeeded or not self._adopt(fetch.chunk, fetch.slots):
            self.token_to_kv_pool_host.free(fetch.slots)

    def _stop_waiting(self, objects: ChunkObjects) -> None:
        """Let requests compute the chunks that they have waited for long enough, on any tensor-parallel rank."""
        now, fetches = self.clock(), list(self.store.fetching.items())
        waits = torch.tensor([now - fetch.asked_at < fetch.patience for _, fetch in fetches], dtype=torch.int64)
        self._all_reduce_attn_groups(waits, torch.distributed.ReduceOp.MIN)
        late = [key for (key, _), still in zip(fetches, waits.tolist(), strict=True) if not still]
        for key in late:
            self._late[key] = self.store.fetching.pop(key)
            self.report.late()
        if late and self.prefetch_stop_policy == "timeout":
            objects.read.abandon(late)
            self._behind = True  # if no thread is left

    def _host_slots(self, num_tokens: int) -> torch.Tensor | None:
        pool = self.token_to_kv_pool_host
        if self._num_fetching + num_tokens > self._most_under_way:
            return None
        if pool.available_size() < num_tokens:
            self.evict_host(num_tokens - pool.available_size())
        return pool.alloc(num_tokens)

    def _adopt(self, chunk: ChunkSlice, slots: torch.Tensor) -> bool:
        """Put a chunk fetched to these slots of the host into the tree.

        Returns False if the tree has the chunk's beginning without a copy on the host.
        """
        key = RadixKey(chunk.tokens, chunk.key.namespace)
        beginning = self._match_prefix_helper(self.root_node, key)[1]
        self.use(beginning)  # SGLang has stamped it with the time of day
        if beginning is not self.root_node and not beginning.backuped:
            return False
        num_present = self._insert_helper_host(self.root_node, key, slots, [])
        self.token_to_kv_pool_host.free(slots[:num_present])
        node = self.end_of(chunk.tokens, chunk.key.namespace)
        self.use(node)  # SGLang has stamped the nodes before it with the time of day
        self._stamp(node)
        self.store.adopt(chunk, node).stored = True
        return True

    # To storage

    def _finish_write_through_ack(self, ack_id: int, *, release_lock: bool) -> None:
        _, _, nodes = self.ongoing_write_through[ack_id]
        super()._finish_write_through_ack(ack_id, release_lock=release_lock)
        for node in nodes:
            chunk = self.store.chunk_at(node)
            if chunk is not None and not chunk.stored and self.objects is not None:
                self._store(chunk, self._path(node), self.objects)

    def back_up(self, nodes: Iterable[TreeNode]) -> None:
        """Also store chunks that were copied as beginnings of longer ones, before they were chunks themselves."""
        nodes = list(nodes)
        super().back_up(nodes)
        if self.objects is None:
            return
        for node in nodes:
            chunk, is_copied = self.store.chunk_at(node), node.backuped and node.write_through_pending_id is None
            if chunk is not None and chunk.stored is None and is_copied:
                self._store(chunk, self._path(node), self.objects)

    def _store(self, chunk: CachedChunk, path: list[TreeNode], objects: ChunkObjects) -> None:
        chunk.stored = False
        slots, name = torch.cat([node.host_value for node in path]), self._name(chunk.key)
        if name is None or self._num_writing + len(slots) > self._most_under_way:
            self.report.unstored()
            return
        for node in path:
            node.protect_host()
        self._num_writing += len(slots)
        objects.start_write(name, slots, (chunk, path, len(slots)))

    def _take_written(self, objects: ChunkObjects) -> None:
        for call in self._ended(objects.written):
            chunk, path, num_tokens = call.what
            chunk.stored = call.succeeded
            self._let_go(path, num_tokens)
            if call.succeeded:
                self.report.stored(num_tokens, call.seconds)
            else:
                self.report.unstored()

    def _let_go(self, path: list[TreeNode], num_tokens: int) -> None:
        for node in path:
            node.release_host()
        self._num_writing -= num_tokens

    # Both

    @property
    def fetches(self) -> list[Fetch]:
        """The reads in progress."""
        return [*self._late.values(), *self.store.fetching.values()]

    @property
    def _most_under_way(self) -> int:
        """The most tokens of the host that reads may hold, and writes as well: half of it, as in SGLang. A backend that
        hangs must not take all of it."""
        return self.token_to_kv_pool_host.size // 2

    def _ended(self, calls: Calls) -> list[Ended]:
        """The results that all tensor-parallel ranks have; one succeeded if it did on all ranks. Ranks make the same
        requests in the same order."""
        calls.relieve(self.prefetch_timeout_config.max)
        num_ended = torch.tensor(calls.num_ended, dtype=torch.int64)
        self._all_reduce_attn_groups(num_ended, torch.distributed.ReduceOp.MIN)
        if not num_ended:
            return []
        outcomes = torch.tensor(calls.outcomes(), dtype=torch.int64)
        self._all_reduce_attn_groups(outcomes, torch.distributed.ReduceOp.MIN)
        return calls.take(outcomes.tolist())

    def _path(self, node: TreeNode) -> list[TreeNode]:
        path = []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _name(self, key: ChunkKey) -> bytes | None:
        """SHA-256 of all that the chunk's KV depends on; of an adapter the weights, since ids and names do not last.
        None if the adapter has been unloaded."""
        kind, _, salt, variant, adapter = key.namespace
        digest = hashlib.sha256()
        for weights in (None,) if adapter is None else (None, adapter):
            if weights not in self._identified:
                self._identified[weights] = self._identity(weights)
            identified = self._identified[weights]
            if identified is None:
                return None
            digest.update(identified)
        digest.update(repr((kind, key.namespace.own_key, salt, variant)).encode() + key.tokens + key.check)
        return digest.digest()

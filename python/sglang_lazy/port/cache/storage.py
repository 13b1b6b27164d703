"""Chunks in one of SGLang's storage backends, beyond the host tier, named by all that their KV depends on.

SGLang's own storage of the tree is left off. At a page size of 1 it keeps an object for each token, and names them by
tokens alone, so that weights, types and namespaces are confused.
"""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_lazy.chunks.store import CachedChunk
from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.port.cache.backends import AddressBackend, TensorBackend
from sglang_lazy.port.cache.chunk_objects import ChunkObjects
from sglang_lazy.port.cache.hiradix import LazyHiRadixCache
from sglang_lazy.port.cache.in_order import Ended, InOrder
from sglang_lazy.port.cache.tier_report import StorageReport, measured
from sglang_lazy.port.model.identity import identity_of

logger = logging.getLogger(__name__)


class Fetch(NamedTuple):
    """A chunk that has been asked of storage, the slots of the host for it, when it was asked for, and for how many
    seconds requests wait for it."""

    chunk: ChunkSlice
    slots: torch.Tensor
    asked_at: float
    patience: float


class StoredHiRadixCache(LazyHiRadixCache):
    """The host tier with a storage behind it: chunks that have a copy on the host are stored as well, and what is found
    nowhere else is asked for there.

    How long requests wait for it says `--hicache-storage-prefetch-policy`, as in SGLang. Whatever arrives later is put
    on the host if it is still missing there.

    clock: in seconds.
    """

    objects_class = ChunkObjects
    objects: ChunkObjects | None = None
    report: StorageReport
    clock = staticmethod(time.monotonic)

    def connect(
        self, backend: TensorBackend, identity: Callable[[str | None], bytes | None], report: StorageReport
    ) -> None:
        """identity: names the weights that KV depends on, those of the model or of the adapter with this id; None for
        an adapter that is not loaded. Asked anew after each flush. Naming the model reads all weights, so it is asked
        for here: the first request must not wait for that."""
        self._backend, self._identity, self.report = backend, identity, report
        self._identified[None] = identity(None)
        self.objects = self.objects_class(backend, self.token_to_kv_pool_host)

    def reset(self) -> None:
        if self.objects is not None:
            self._settle(self.objects)
        self.store.fetching.clear()
        self._late: dict[ChunkKey, Fetch] = {}
        self._num_writing = self._num_fetching = 0  # tokens
        self._identified: dict[str | None, bytes | None] = {}
        super().reset()

    def _settle(self, objects: ChunkObjects) -> None:
        """Have all written that is to be, for as long as the backend makes progress: slots are about to be reused."""
        settled = torch.tensor(objects.settle(self.prefetch_timeout_config.max), dtype=torch.int64)
        self._all_reduce_attn_groups(settled, torch.distributed.ReduceOp.MIN)
        if settled:
            self.check_hicache_events()
            return
        objects.give_up()
        num_lost = len(objects.written)
        self.report.unstored(num_lost)
        logger.error("sglang-lazy: the storage backend does not answer; %d chunks are not stored", num_lost)
        self.objects = self.objects_class(self._backend, self.token_to_kv_pool_host)

    @property
    def storage_name(self) -> str:
        """As SGLang calls it in reports."""
        return type(self._backend.backend).__name__

    # From storage

    def fetch(self, chunk: ChunkSlice) -> bool:
        if self.objects is None:
            return False
        if chunk.key in self.store.fetching or chunk.key in self._late:
            return True
        if self._late and self.prefetch_stop_policy == "timeout":
            return False  # storage has fallen behind: nobody waits for more of it until it has caught up
        name = self._name(chunk.key)
        slots = None if name is None else self._host_slots(chunk.num_tokens)
        if name is None or slots is None:
            return False
        self._num_fetching += len(slots)
        self.store.fetching[chunk.key] = Fetch(chunk, slots, self.clock(), self._patience())
        self.objects.start_read(name, slots, chunk.key)
        return True

    def _patience(self) -> float:
        """For how many seconds requests wait for a chunk that is being asked for. Others are read before it."""
        limits = self.prefetch_timeout_config
        linear = min(limits.max, limits.base + limits.per_ki_token * self._num_fetching / 1024)
        return {"best_effort": 0.0, "timeout": linear, "wait_complete": math.inf}[self.prefetch_stop_policy]

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.objects is None:
            return
        if self._num_writing:
            for call in self._ended(self.objects.written):
                chunk, path, num_tokens = call.what
                chunk.stored = call.succeeded
                for node in path:
                    node.release_host()
                self._num_writing -= num_tokens
                if call.succeeded:
                    self.report.stored(num_tokens, call.seconds)
                else:
                    self.report.unstored()
        if self.store.fetching or self._late:
            for call in self._ended(self.objects.read):
                fetch = self._late.pop(call.what, None) or self.store.fetching.pop(call.what)
                self._end_fetch(fetch, call)
        if self.store.fetching:
            self._stop_waiting()

    def _end_fetch(self, fetch: Fetch, call: Ended) -> None:
        self._num_fetching -= len(fetch.slots)
        wait = self.clock() - fetch.asked_at
        if call.succeeded:
            self.report.fetched(len(fetch.slots), call.seconds, wait)
        else:
            self.report.missed(wait)
        if not call.succeeded or not self._adopt(fetch.chunk, fetch.slots):
            self.token_to_kv_pool_host.free(fetch.slots)

    def _stop_waiting(self) -> None:
        """Let requests that have waited for long enough, on any tensor-parallel rank, compute their chunks."""
        now, fetches = self.clock(), list(self.store.fetching.items())
        waits = torch.tensor([now - fetch.asked_at < fetch.patience for _, fetch in fetches], dtype=torch.int64)
        self._all_reduce_attn_groups(waits, torch.distributed.ReduceOp.MIN)
        for (key, fetch), still in zip(fetches, waits.tolist(), strict=True):
            if not still:
                self._late[key] = fetch
                del self.store.fetching[key]
                self.report.late()

    def _host_slots(self, num_tokens: int) -> torch.Tensor | None:
        pool = self.token_to_kv_pool_host
        if self._num_fetching + num_tokens > self._most_under_way:
            return None
        if pool.available_size() < num_tokens:
            self.evict_host(num_tokens - pool.available_size())
        return pool.alloc(num_tokens)

    def _adopt(self, chunk: ChunkSlice, slots: torch.Tensor) -> bool:
        """Put a chunk that was fetched to these slots of the host into the tree.

        False if its beginning is there without a copy on the host.
        """
        key = RadixKey(chunk.tokens, chunk.key.namespace)
        beginning = self._match_prefix_helper(self.root_node, key)[1]
        self.use(beginning)  # SGLang has stamped it
        if beginning is not self.root_node and not beginning.backuped:
            return False
        num_present = self._insert_helper_host(self.root_node, key, slots, [])
        self.token_to_kv_pool_host.free(slots[:num_present])
        node = self.end_of(chunk.tokens, chunk.key.namespace)
        self.use(node)  # SGLang has marked the nodes before it with the time of day
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
        """Also store chunks that had a copy before they were known, as beginnings of longer ones."""
        nodes = list(nodes)
        super().back_up(nodes)
        for node in nodes:
            chunk, is_copied = self.store.chunk_at(node), node.backuped and node.write_through_pending_id is None
            if chunk is not None and chunk.stored is None and is_copied and self.objects is not None:
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

    # Both

    @property
    def fetches(self) -> list[Fetch]:
        """Those that have not ended."""
        return [*self._late.values(), *self.store.fetching.values()]

    @property
    def _most_under_way(self) -> int:
        """Tokens of the host that reads may hold at most, and as many for writes: half of it, as in SGLang. A backend
        that hangs must not take it all."""
        return self.token_to_kv_pool_host.size // 2

    def _ended(self, asked: InOrder) -> Iterator[Ended]:
        """The calls that have ended on all tensor-parallel ranks; one succeeded if it did on all of them. They ask for
        the same in the same order.
        """
        num_ended = torch.tensor(asked.num_ended(), dtype=torch.int64)
        self._all_reduce_attn_groups(num_ended, torch.distributed.ReduceOp.MIN)
        if not num_ended:
            return
        ended = [asked.take() for _ in range(int(num_ended))]
        succeeded = torch.tensor([call.succeeded for call in ended], dtype=torch.int64)
        self._all_reduce_attn_groups(succeeded, torch.distributed.ReduceOp.MIN)
        yield from (call._replace(succeeded=bool(ok)) for call, ok in zip(ended, succeeded.tolist(), strict=True))

    def _path(self, node: TreeNode) -> list[TreeNode]:
        path = []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _name(self, key: ChunkKey) -> bytes | None:
        """SHA-256 of all that the chunk's KV depends on: of an adapter its weights, since ids and names come and go.
        None if it has been unloaded."""
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


def connect_storage(cache: StoredHiRadixCache, args: Any, runner: Any, has_metrics: bool) -> None:
    """Put the storage that SGLang's flags ask for behind a cache that was made without."""
    name, pool = args.hicache_storage_backend, cache.token_to_kv_pool_host
    extra_config = cache._parse_storage_backend_extra_config(args.hicache_storage_backend_extra_config)[0]
    # In the place of the model's name, since identities tell models apart, from whatever folder they are served.
    config = cache.cache_controller._generate_storage_config("sglang-lazy", extra_config)
    backend = StorageBackendFactory.create_backend(name, config, pool)
    if name == "mooncake":
        objects: TensorBackend = AddressBackend(backend)
    else:
        backend.register_mem_pool_host(pool)
        objects = TensorBackend(backend)
    report = StorageReport(pool.get_size_per_token())
    if has_metrics:
        ranks = ("tp_rank", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
        labels = {"storage_backend": name, "dp_rank": cache.cache_controller.dp_rank}
        labels |= {rank: getattr(config, rank) for rank in ranks} | (args.extra_metric_labels or {})
        report = measured(pool.get_size_per_token(), labels, args)
    cache.connect(objects, lambda adapter: identity_of(runner, adapter), report)

"""Chunks in one of SGLang's storage backends, beyond the host tier: one object for each, named by all that its KV
depends on.

SGLang's own storage of the tree is left off. At a page size of 1 it keeps an object for each token, and names them by
tokens alone, so that weights, types and namespaces are confused.
"""

import hashlib
import json
import logging
import queue
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.port.hiradix import LazyHiRadixCache

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<8s32sQI12x")
_MAGIC = b"lazy-kv1"


class ChunkObjects:
    """Moves chunks between a host pool and a backend, in order, on one thread for each direction.

    An object is a header with the chunk's name, length and checksum, then keys and values, [2, layers, tokens, heads,
    head_dim], in the type of the cache. Whatever is not such an object of that name counts as missing.

    written, read_back: for each call of `write` and `read` that has ended its `what`, and whether it succeeded.
    """

    def __init__(self, backend: Any, pool: Any):
        self.backend, self.pool = backend, pool
        self.written: queue.SimpleQueue = queue.SimpleQueue()
        self.read_back: queue.SimpleQueue = queue.SimpleQueue()
        self._writes: queue.Queue = queue.Queue()
        self._reads: queue.Queue = queue.Queue()
        for asked, act, done in (
            (self._writes, self._write, self.written),
            (self._reads, self._read, self.read_back),
        ):
            threading.Thread(target=self._work, args=(asked, act, done), daemon=True).start()

    def write(self, name: bytes, slots: torch.Tensor, what: Any) -> None:
        """Store the KV in these slots of the host, int64; they must not change before it is done."""
        self._writes.put((name, slots, what))

    def read(self, name: bytes, slots: torch.Tensor, what: Any) -> None:
        """Fetch KV into these slots of the host, int64."""
        self._reads.put((name, slots, what))

    def settle(self) -> None:
        """Wait until all is done that was asked for."""
        self._writes.join()
        self._reads.join()

    def _work(self, asked: queue.Queue, act: Callable, done: queue.SimpleQueue) -> None:
        while True:
            name, slots, what = asked.get()
            try:
                succeeded = act(name, slots)
            except Exception:  # of the backend: whatever it raises, the server goes on
                logger.exception("sglang-lazy: the storage backend failed")
                succeeded = False
            done.put((what, succeeded))
            asked.task_done()

    def _write(self, name: bytes, slots: torch.Tensor) -> bool:
        stored, parts = self._new_object(len(slots))
        for layer, part in parts:
            torch.index_select(layer, 0, slots, out=part)
        stored[: _HEADER.size] = torch.frombuffer(bytearray(_header(name, stored)), dtype=torch.uint8)
        return bool(self.backend.batch_set([name.hex()], [stored]))

    def _read(self, name: bytes, slots: torch.Tensor) -> bool:
        if not self.backend.exists(name.hex()):
            return False
        stored, parts = self._new_object(len(slots))
        found = self.backend.batch_get([name.hex()], [stored])
        if not found or found[0] is None:
            return False
        if stored[: _HEADER.size].numpy().tobytes() != _header(name, stored):
            logger.warning("sglang-lazy: stored object %s is damaged", name.hex())
            return False
        for layer, part in parts:
            layer[slots] = part
        return True

    def _new_object(self, num_tokens: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Memory for an object, uint8; and each layer of the host, [slots, heads, head_dim], with its part of that."""
        layers = [*self.pool.k_data_refs, *self.pool.v_data_refs]
        stored = torch.empty(_HEADER.size + num_tokens * self.pool.get_size_per_token(), dtype=torch.uint8)
        parts = stored[_HEADER.size :].view(self.pool.dtype).view(len(layers), num_tokens, *layers[0].shape[1:])
        return stored, list(zip(layers, parts, strict=True))


def _header(name: bytes, stored: torch.Tensor) -> bytes:
    payload = stored[_HEADER.size :]
    return _HEADER.pack(_MAGIC, name, len(payload), zlib.crc32(payload.numpy()))


class StoredHiRadixCache(LazyHiRadixCache):
    """The host tier with a storage behind it: chunks that have a copy on the host are stored as well, and what is found
    nowhere else is asked for there."""

    objects_class = ChunkObjects
    objects: ChunkObjects | None = None

    def connect(self, backend: Any, identity: Callable[[], bytes]) -> None:
        """backend: SGLang's.  identity: names what all KV of this server depends on; asked anew after each flush."""
        self._identity = identity
        self.objects = self.objects_class(backend, self.token_to_kv_pool_host)

    def reset(self) -> None:
        if self.objects is not None:
            self.objects.settle()  # what is being written must not be overwritten
            self.check_hicache_events()
        self._num_writing = 0
        self._identified: bytes | None = None
        super().reset()

    def fetch(self, chunk: ChunkSlice) -> bool:
        if self.objects is None:
            return False
        if chunk.key not in self.store.fetching:
            slots = self._host_slots(chunk.num_tokens)
            if slots is None:
                return False
            self.store.fetching[chunk.key] = chunk, slots
            self.objects.read(self._name(chunk.key), slots, chunk.key)
        return True

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        if self.objects is None:
            return
        if self._num_writing:
            for path, _ in self._ended(self.objects.written):
                self._num_writing -= 1
                for node in path:
                    node.release_host()
        if self.store.fetching:
            for key, found in self._ended(self.objects.read_back):
                chunk, slots = self.store.fetching.pop(key)
                if not found or not self._adopt(chunk, slots):
                    self.token_to_kv_pool_host.free(slots)

    def _finish_write_through_ack(self, ack_id: int, *, release_lock: bool) -> None:
        _, _, nodes = self.ongoing_write_through[ack_id]
        super()._finish_write_through_ack(ack_id, release_lock=release_lock)
        for node in nodes:
            key = self.store.key_at(node)
            if key is not None and self.objects is not None:
                path = self._path(node)
                for above in path:
                    above.protect_host()
                slots = torch.cat([above.host_value for above in path])
                self.objects.write(self._name(key), slots, path)
                self._num_writing += 1

    def _ended(self, done: queue.SimpleQueue) -> Iterator[tuple[Any, bool]]:
        """What has ended on all tensor-parallel ranks; it succeeded if it did on all of them. They ask for the same in
        the same order.
        """
        ended = torch.tensor(done.qsize(), dtype=torch.int64)
        self._all_reduce_attn_groups(ended, torch.distributed.ReduceOp.MIN)
        if not ended:
            return
        results = [done.get() for _ in range(int(ended))]
        succeeded = torch.tensor([ok for _, ok in results], dtype=torch.int64)
        self._all_reduce_attn_groups(succeeded, torch.distributed.ReduceOp.MIN)
        yield from ((what, bool(ok)) for (what, _), ok in zip(results, succeeded.tolist(), strict=True))

    def _host_slots(self, num_tokens: int) -> torch.Tensor | None:
        pool = self.token_to_kv_pool_host
        if pool.available_size() < num_tokens:
            self.evict_host(num_tokens - pool.available_size())
        return pool.alloc(num_tokens)

    def _adopt(self, chunk: ChunkSlice, slots: torch.Tensor) -> bool:
        """Put a chunk that was fetched to these slots of the host into the tree.

        False if its beginning is there without a copy on the host.
        """
        key = RadixKey(chunk.tokens, chunk.key.namespace)
        beginning = self._match_prefix_helper(self.root_node, key)[1]
        if beginning is not self.root_node and not beginning.backuped:
            return False
        num_present = self._insert_helper_host(self.root_node, key, slots, [])
        self.token_to_kv_pool_host.free(slots[:num_present])
        node = self.end_of(chunk.tokens, chunk.key.namespace)
        self._stamp(node)
        self.store.adopt(chunk, node)
        return True

    def _path(self, node: TreeNode) -> list[TreeNode]:
        path = []
        while node is not self.root_node:
            path.append(node)
            node = node.parent
        return path[::-1]

    def _name(self, key: ChunkKey) -> bytes:
        """SHA-256 of all that the chunk's KV depends on."""
        if self._identified is None:
            self._identified = self._identity()
        return hashlib.sha256(self._identified + repr(tuple(key.namespace)).encode() + key.tokens).digest()


def connect_storage(cache: StoredHiRadixCache, args: Any, runner: Any) -> None:
    """Put the storage that SGLang's flags ask for behind a cache that was made without."""
    extra_config = cache._parse_storage_backend_extra_config(args.hicache_storage_backend_extra_config)[0]
    config = cache.cache_controller._generate_storage_config(args.served_model_name, extra_config)
    pool = cache.token_to_kv_pool_host
    backend = StorageBackendFactory.create_backend(args.hicache_storage_backend, config, pool)
    backend.register_mem_pool_host(pool)
    cache.connect(backend, lambda: model_identity(runner))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element."""


def model_identity(runner: Any) -> bytes:
    """SHA-256 of what the KV of a `ModelRunner` depends on besides tokens: its model, the type of its cache, and its
    part of the heads.

    Weights count by the sums of the bits in each row and each column. These are quick on the device, and differ even
    where training has changed no more than the rows of a few tokens.
    """
    config = {**runner.model_config.hf_config.to_dict(), "_name_or_path": None, "transformers_version": None}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    digest.update(repr((str(runner.kv_cache_dtype), runner.ps.tp_rank, runner.ps.tp_size)).encode())
    for name, weight in sorted(runner.model.named_parameters()):
        bits = weight.detach().view(_BITS[weight.element_size()])
        sums = [bits.sum(dim, dtype=torch.int64) for dim in (-1, -2)] if bits.dim() > 1 else [bits]
        digest.update(name.encode() + b"".join([part.cpu().numpy().tobytes() for part in sums]))
    return digest.digest()

"""Chunks in one of SGLang's storage backends, beyond the host tier, named by all that their KV depends on.

SGLang's own storage of the tree is left off. At a page size of 1 it keeps an object for each token, and names them by
tokens alone, so that weights, types and namespaces are confused.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode
from sglang.srt.mem_cache.storage import StorageBackendFactory

from sglang_lazy.core.keys import ChunkKey
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.port.chunk_objects import ChunkObjects, InOrder
from sglang_lazy.port.hiradix import LazyHiRadixCache


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
            self.objects.start_read(self._name(chunk.key), slots, chunk.key)
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
            for key, found in self._ended(self.objects.read):
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
                self.objects.start_write(self._name(key), slots, path)
                self._num_writing += 1

    def _ended(self, asked: InOrder) -> Iterator[tuple[Any, bool]]:
        """What has ended on all tensor-parallel ranks; it succeeded if it did on all of them. They ask for the same in
        the same order.
        """
        ended = torch.tensor(asked.num_ended(), dtype=torch.int64)
        self._all_reduce_attn_groups(ended, torch.distributed.ReduceOp.MIN)
        if not ended:
            return
        results = [asked.take() for _ in range(int(ended))]
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

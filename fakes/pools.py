"""SGLang's pools and a cache over them, by default on the CPU, with forward passes that compute nothing."""

import copy
import dataclasses
import inspect
import time
import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache import hiradix_cache
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from fakes.requests import VOCAB_SIZE
from sglang_lazy.attention.cross import CrossBatch
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.encoding import Encoding
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.port.cache.backends import TensorBackend
from sglang_lazy.port.cache.chunk_objects import ChunkObjects
from sglang_lazy.port.cache.cross import TextHiRadixCache, TextRadixCache
from sglang_lazy.port.cache.host_pool import CpuHostPool
from sglang_lazy.port.cache.hybrid import LazyHybridCache
from sglang_lazy.port.cache.radix import LazyRadixCache
from sglang_lazy.port.cache.storage import StoredHiRadixCache
from sglang_lazy.port.cache.tier_report import StorageReport
from sglang_lazy.port.model import model_runner
from sglang_lazy.port.scheduler import steps as hooks

NUM_ROTATIONS = 1 << 20
"""Rows of the rotation table: enough for the positions of any prompt here, and as many negative ones."""


class Pools:
    """A model runner's pools without the model, and the scheduler's cache.

    host_size: slots of the host tier, for each pool if there are two; 0 for no host tier.
    storage: a stand-in for SGLang's storage backend behind the host tier.
    chunk_size: slots of a separate pool for chunks, which an encoder computes; 0 if chunks share the other pool.
    window: how many earlier tokens a query sees in the first layer, which then has a pool of its own with
        `window_size` slots; 0 for all.
    """

    objects_class = ChunkObjects

    host_pool_class = CpuHostPool

    def __init__(
        self,
        size: int,
        *,
        num_rows: int = 8,
        context_len: int = 64,
        max_chunks: int = 8,
        vocab_size: int = VOCAB_SIZE,
        eviction_policy: str = "lru",
        cache_class: type[RadixCache] = LazyRadixCache,
        device: str = "cpu",
        host_size: int = 0,
        write_policy: str = "write_through",
        storage: Any = None,
        chunk_size: int = 0,
        window: int = 0,
        window_size: int = 0,
    ):
        self.window = window
        self.kv = kv = new_kv(size, window_size, device)
        whole = kv.full_kv_pool if window else kv
        self.keys, self.values = whole.k_buffer[0], whole.v_buffer[0]
        self.slots = self.chunk_slots = self.new_slots(size, window_size, device, kv)
        self.rows = ReqToTokenPool(num_rows, context_len, device, enable_memory_saver=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=1,
            eviction_policy=eviction_policy,
            sliding_window_size=window or None,
        )
        if chunk_size:
            self.chunk_kv = new_kv(chunk_size, 0, device)
            self.chunk_slots = self.new_slots(chunk_size, 0, device, self.chunk_kv)
        beside = CacheInitParams(**{**vars(params), "token_to_kv_pool_allocator": self.chunk_slots})
        self.has_tiers, self.slow = host_size > 0, False

        def tier(size: int) -> Any:
            flags = copy.copy(get_server_args())
            flags.hicache_ratio, flags.hicache_write_policy = (host_size - 1) / size, write_policy  # SGLang adds one
            flags.hicache_mem_layout = "layer_first"
            return flags

        if self.has_tiers:
            with mock.patch.object(hiradix_cache, "get_mha_host_pool_cls", lambda _pool: self.host_pool_class):
                self.cache = chunks = StoredHiRadixCache(beside, tier(chunk_size or size))
                if chunk_size:
                    self.cache = TextHiRadixCache(params, tier(size), chunks=chunks)
            chunks.objects_class = self.objects_class
            if storage is not None:
                self.connect(storage)
        elif chunk_size:
            self.cache = TextRadixCache(params, chunks=LazyRadixCache(beside))
        else:
            self.cache = LazyHybridCache(params) if window else cache_class(params)
        if isinstance(self.cache, LazyRadixCache):
            num_rows = len(self.rows.req_to_token)
            batch_type = CrossBatch if chunk_size else LinkedBatch
            self.rows.segment_table = SegmentTable(num_rows, max_chunks, device, self.new_model(device), batch_type)
        self.model_config = types.SimpleNamespace(
            vocab_size=vocab_size,
            context_len=context_len,
            hf_eos_token_id=set(),
            is_encoder_decoder=False,
            hidden_size=64,
        )
        self.runner = types.SimpleNamespace(
            req_to_token_pool=self.rows,
            token_to_kv_pool=kv,
            model_config=self.model_config,
            ps=types.SimpleNamespace(tp_size=1),
            device=device,
        )

    def connect(self, storage: Any, model: bytes = b"model", **adapters: bytes) -> None:
        """Attach storage behind the host tier.  model, adapters: the digests of their weights, of adapters by id."""
        weights = {None: model, "x": b"adapter x", "y": b"adapter y", **adapters}
        self.cache.store.tree.connect(TensorBackend(storage), weights.get, StorageReport(token_size=1))

    def new_slots(self, size: int, window_size: int, device: str, kv: Any) -> BaseTokenToKVPoolAllocator:
        if window_size:
            return SWATokenToKVPoolAllocator(size, window_size, 1, torch.float32, device, kv, need_sort=False)
        return TokenToKVPoolAllocator(size, torch.float32, device, kv, need_sort=False)

    @property
    def num_free(self) -> int:
        """Free slots of the layers without windows."""
        return self.slots.full_available_size() if self.window else self.slots.available_size()

    def new_model(self, device: str) -> ServedModel:
        """A model of two layers. Its keys are numbers that no rotation changes; it has no values."""
        table = torch.tensor([[1.0, 0.0]], device=device).expand(NUM_ROTATIONS, 2)
        rope = types.SimpleNamespace(cos_sin_cache=table, is_neox=True)
        layer = AttentionLayer(1, 1, 2, rope, kernels=types.SimpleNamespace(copy_rotated=self.copy_rotated))
        if not self.window:
            return ServedModel({0: (self.keys, None), 1: (self.keys, None)}, {0: layer, 1: layer})
        layers = {0: dataclasses.replace(layer, window=self.window + 1), 1: layer}
        window_keys, window_slots = self.kv.swa_kv_pool.k_buffer[0], self.kv.translate_loc_from_full_to_swa
        return ServedModel({0: (window_keys, None), 1: (self.keys, None)}, layers, window_slots)

    def flush(self) -> None:
        """Flush the cache as SGLang does."""
        self.cache.reset()
        self.rows.clear()
        self.slots.clear()

    def take_acknowledgements(self) -> None:
        """Process the acknowledgements of copies and, unless storage is `slow`, finish stores first."""
        if self.has_tiers:
            objects = self.cache.store.tree.objects
            if objects is not None and not self.slow:
                _finish(objects)
            self.cache.check_hicache_events()

    def new_batch(self, reqs: Sequence[Req], chunked_req: Req | None = None, overlap: bool = False) -> ScheduleBatch:
        """A batch whose requests are about to compute their `extend_range`."""
        return ScheduleBatch.init_new(
            list(reqs),
            self.rows,
            self.slots,
            self.cache,
            self.model_config,
            overlap,
            SpeculativeAlgorithm.NONE,
            chunked_req=chunked_req,
        )

    def assign_rows(self, batch: ScheduleBatch) -> None:
        """SGLang's part of preparing a prefill batch, unwrapped in case an engine has installed our hooks here."""
        inspect.unwrap(ScheduleBatch.prepare_for_extend)(batch)

    def launch(self, batch: ScheduleBatch) -> None:
        """Run our hooks on a batch whose rows are assigned, then the forward pass."""
        if batch.forward_mode.is_extend():
            hooks.prepare_for_extend(None, batch)
        worker = types.SimpleNamespace(model_runner=self.runner)
        model_runner.forward_batch_generation(lambda _worker, batch: self.wait_and_forward(batch), worker, batch)

    def wait_and_forward(self, batch: ScheduleBatch) -> None:
        """Run the forward pass after a prefill batch's loads, for which attention would wait."""
        if self.has_tiers and batch.forward_mode.is_extend() and batch.hicache_consumer_index >= 0:
            counter = self.cache.cache_controller.layer_done_counter
            counter.events[batch.hicache_consumer_index].wait(counter.num_layers - 1)
        self.forward(batch)

    # Overridden by recorders

    def forward(self, batch: ScheduleBatch) -> None:
        """The forward pass of a batch."""

    def encode(self, encodings: Sequence[Encoding]) -> None:
        """The encoder's pass."""

    def copy_rotated(self, k_caches: Any, v_caches: Any, source, target, rotations, *_args: Any, **_kwargs: Any):
        """In place of the kernel `copy_rotated`."""


def new_kv(size: int, window_size: int, device: str) -> MHATokenToKVPool | SWAKVPool:
    """SGLang's pool for two layers. With a `window_size`, the first layer has a window."""
    if not window_size:
        return MHATokenToKVPool(size, 1, torch.float32, 1, 2, 2, device, False, enable_alt_stream=False)
    return SWAKVPool(size, window_size, 1, torch.float32, 1, 2, [0], [1], device, enable_alt_stream=False)


def _finish(objects: ChunkObjects) -> None:
    """Wait for all calls. A flush would cancel some once one has failed."""
    deadline = time.monotonic() + 60
    while any(calls.num_ended < len(calls) for calls in (objects.written, objects.read)):
        assert time.monotonic() < deadline, "storage does not answer"
        time.sleep(1e-4)

"""SGLang's pools and a cache over them, by default on the CPU, with forward passes that compute nothing."""

import dataclasses
import time
import types
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, default_radix_cache_factory
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_memory, get_server_args

from fakes.late_copies import late_transfers
from fakes.requests import VOCAB_SIZE
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.cache.host_memory import HostMemory
from sglang_lazy.cache.transfers import Transfers
from sglang_lazy.comb.cross import CrossBatch
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.fills import Encoding
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.core.state import fill_of, linked
from sglang_lazy.port.cache import create
from sglang_lazy.port.cache.storage import TensorBackend
from sglang_lazy.port.facts import pass_of
from sglang_lazy.port.model import model_runner
from sglang_lazy.port.model.recurrent import RecurrentLayers
from sglang_lazy.recurrent.pieces import ChunkRow, Text, TextRow
from sglang_lazy.recurrent.pool import StateLayout, StatePool
from sglang_lazy.recurrent.rows import RowStates, rows_of
from sglang_lazy.storage import tiers
from sglang_lazy.storage.chunk_objects import ChunkObjects
from sglang_lazy.storage.chunk_storage import ChunkStorage, Patience
from sglang_lazy.storage.report import StorageReport

NUM_ROTATIONS = 1 << 20
"""Rows of the rotation table: enough for the positions of any prompt here, and as many negative ones."""


class Layers(RecurrentLayers):
    """Recurrent layers whose states say what they have gone through: a state is a number, that of a path.

    paths: by their numbers, as `contents_of` has them.  of_requests: the path of each request.
    """

    def __init__(self, num_states: int, max_pieces: int, device: str):
        self.pool = StatePool(StateLayout(1, ((1, 2),), torch.float32), num_states, device)
        self.max_pieces, self.knows_ends = max_pieces, True
        self.pieces, self.finish, self._streams = None, lambda: None, torch.get_device_module(device)
        self.paths: list[tuple] = [()]
        self.of_requests = weakref.WeakKeyDictionary[Any, tuple]()

    def path(self, slot: int) -> tuple:
        """What the state in a slot has gone through from zero."""
        return self.paths[int(self.pool.conv[0][0, slot, 0, 0])]

    def write(self, slot: int, path: tuple) -> None:
        self.pool.conv[0][0, slot] = len(self.paths)
        self.paths.append(path)

    def save(self, req: Any, slot: int) -> None:
        self.write(slot, self.of_requests[req])

    @contextmanager
    def running(self, batch: Any) -> Iterator[None]:
        """What states are read is known when the pass runs, which waits for those from the host."""
        current = pass_of(batch)
        if current.prefix_lens is None:
            yield
            for req in batch.reqs:
                if linked(req) is not None:
                    self.of_requests[req] += (req.contents[req.kv.kv_committed_len - 1][3][-1],)
            return
        with super().running(batch):  # which also sees to it that the batch has no chunk twice
            states = batch.tree_cache.store.states
            slots = [
                RowStates() if linked(req) is None else self._slots(states, req, prefix_len)
                for req, prefix_len in zip(batch.reqs, current.prefix_lens, strict=True)
            ]
            yield
            rows = rows_of(current, slots)
            for row in sorted(rows, key=lambda row: isinstance(row, TextRow)):
                if isinstance(row, ChunkRow):
                    self._compute_chunk(row, batch)
                elif linked(batch.reqs[row.slot]) is not None:
                    self._compute_text(row, batch.reqs[row.slot])

    def _compute_chunk(self, row: ChunkRow, batch: Any) -> None:
        (contents,) = [
            req.contents[fill.row.ranges(part)[0][0] :]
            for req in batch.reqs
            if (fill := fill_of(req)) is not None
            for part, slot in enumerate(fill.states)
            if slot == row.slot
        ]
        start = len(self.path(row.slot)) if row.resumed else 0
        self.write(row.slot, tuple(each[3] for each in contents[: start + row.num_tokens]))

    def _compute_text(self, row: TextRow, req: Any) -> None:
        path = self.of_requests[req] if row.resumed else ()
        for i, part in enumerate(row.parts):
            if isinstance(part, Text):
                positions = range(len(path), len(path) + part.num_tokens)
                path += tuple(req.contents[position][3][-1] for position in positions)
            else:
                path += self.path(part.slot)
            if row.keeps is not None and i == 0:
                self.write(row.keeps, path)
        self.of_requests[req] = path
        assert path == req.contents[len(path) - 1][3], "another state than that before the text"


class Pools:
    """A model runner's pools without the model, and the scheduler's cache.

    host_size: slots of the host tier; 0 for no host tier.
    write_policy: what is copied there, one of SGLang's.
    storage: a stand-in for SGLang's storage backend behind the host tier.
    slow: whether steps are taken while storage has not answered.
    chunk_size: slots of a separate pool for chunks, which an encoder computes; 0 if chunks share the other pool.
    window: how many earlier tokens a query sees in the first layer, which then has a pool of its own with
        `window_size` slots; 0 for all.
    num_states: how many chunks and answers can have states of recurrent layers; 0 without such layers.
    max_pieces: how many pieces recurrent layers can compute in one pass.
    """

    objects_class = ChunkObjects
    reuses = True
    """Whether chunks are served: else the cache is SGLang's own."""
    tree_core: str | None = "python"
    """SGLang's, whose nodes can be looked at; None for the one that it prefers."""

    patience = Patience("timeout", base=2.0, per_ki_token=0.1, max=30.0)

    def __init__(
        self,
        size: int,
        *,
        num_rows: int = 8,
        context_len: int = 64,
        max_chunks: int = 8,
        vocab_size: int = VOCAB_SIZE,
        eviction_policy: str = "lru",
        device: str = "cpu",
        host_size: int = 0,
        write_policy: str = "write_through",
        storage: Any = None,
        chunk_size: int = 0,
        window: int = 0,
        window_size: int = 0,
        num_states: int = 0,
        max_pieces: int = 1000,
    ):
        self.window, self.has_tiers, self.slow = window, host_size > 0, False
        self.kv = kv = new_kv(size, window_size, device)
        whole = kv.full_kv_pool if window else kv
        self.keys, self.values = whole.k_buffer[0], whole.v_buffer[0]
        self.slots = self.chunk_slots = self.new_slots(size, window_size, device, kv)
        self.rows = ReqToTokenPool(num_rows, context_len, device, enable_memory_saver=False)
        if chunk_size:
            self.chunk_kv = new_kv(chunk_size, 0, device)
            self.chunk_slots = self.new_slots(chunk_size, 0, device, self.chunk_kv)
            self.rows.chunk_pool = types.SimpleNamespace(kv=self.chunk_kv, allocator=self.chunk_slots)
        batch_type = CrossBatch if chunk_size else LinkedBatch
        num_rows = len(self.rows.req_to_token)
        if self.reuses:
            self.rows.segment_table = SegmentTable(num_rows, max_chunks, device, self.new_model(device), batch_type)
        if num_states:
            self.rows.segment_table.recurrent = Layers(num_states, max_pieces, device)
        self.model_config = types.SimpleNamespace(
            vocab_size=vocab_size,
            context_len=context_len,
            hf_eos_token_id=set(),
            is_encoder_decoder=False,
            hidden_size=64,
            self_opened_think_start_ids=(),
        )
        self.runner = types.SimpleNamespace(
            req_to_token_pool=self.rows, token_to_kv_pool=kv, model_config=self.model_config, device=device
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.slots,
            page_size=1,
            eviction_policy=eviction_policy,
            sliding_window_size=window or None,
            tree_core_backend=self.tree_core,
        )
        ratio = (host_size + 0.5) / (chunk_size or size) / LazyConfig.current().host_share
        flags = {"hicache_ratio": ratio, "hicache_write_policy": write_policy}
        with get_memory().override(**flags), mock.patch.object(tiers, "Transfers", self.new_transfers):
            context = self._context(params)
            self.cache = create.new_cache(context, self.runner) if self.reuses else default_radix_cache_factory(context)
        if storage is not None:
            self.connect(storage)

    def _context(self, params: CacheInitParams) -> TreeCacheBuildContext:
        """What SGLang gives to whoever creates a cache."""
        return TreeCacheBuildContext(
            server_args=get_server_args(),
            params=params,
            is_hybrid_swa=self.window > 0,
            is_hybrid_ssm=False,
            enable_hierarchical_cache=self.has_tiers,
            disable_radix_cache=False,
            tp_worker=None,
            model_config=self.model_config,
            tp_size=1,
            tp_rank=0,
            tp_group=None,
        )

    def new_transfers(self, memory: HostMemory, states: HostMemory | None = None) -> Transfers:
        """Copies between device and host."""
        return late_transfers(memory, states)

    def connect(self, storage: Any, model: bytes = b"model", **adapters: bytes) -> None:
        """Attach storage behind the host tier.  model, adapters: the digests of their weights, of adapters by id."""
        weights = {None: model, "x": b"adapter x", "y": b"adapter y", **adapters}
        tiers, report = self.cache.tiers, StorageReport(token_size=1)
        states = None if tiers.host.states is None else tiers.host.states.memory
        objects = self.objects_class(TensorBackend(storage), tiers.host.memory, states)
        store = self.cache.store
        tiers.connect(ChunkStorage(store, tiers.host, objects, weights.get, tiers.agree, report, self.patience))

    def new_slots(self, size: int, window_size: int, device: str, kv: Any) -> BaseTokenToKVPoolAllocator:
        if window_size:
            return SWATokenToKVPoolAllocator(size, window_size, 1, torch.float32, device, kv, need_sort=False)
        return TokenToKVPoolAllocator(size, torch.float32, device, kv, need_sort=False)

    @property
    def num_free(self) -> int:
        """Free slots of the layers without windows."""
        return self.slots.full_available_size() if self.window else self.slots.available_size()

    def new_model(self, device: str) -> ServedModel:
        """A model of two layers. Its keys are numbers that no rotation changes; nobody reads its values."""
        table = torch.tensor([[1.0, 0.0]], device=device).expand(NUM_ROTATIONS, 2)
        rope = types.SimpleNamespace(cos_sin_cache=table, is_neox=True)
        layer = AttentionLayer(1, 1, 2, rope, kernels=types.SimpleNamespace(copy_rotated=self.copy_rotated))
        if not self.window:
            return ServedModel({0: (self.keys, self.values), 1: (self.keys, self.values)}, {0: layer, 1: layer})
        layers = {0: dataclasses.replace(layer, window=self.window + 1), 1: layer}
        of_window, window_slots = self.kv.swa_kv_pool, self.kv.full_to_swa_index_mapping
        buffers = {0: (of_window.k_buffer[0], of_window.v_buffer[0]), 1: (self.keys, self.values)}
        return ServedModel(buffers, layers, window_slots)

    def flush(self) -> None:
        """Flush the cache as SGLang does."""
        self.cache.reset()
        self.rows.clear()
        self.slots.clear()

    def take_acknowledgements(self) -> None:
        """Take note of copies that have ended and, unless storage is `slow`, let it finish first."""
        if self.has_tiers:
            if self.cache.tiers.storage is not None and not self.slow:
                _finish(self.cache.tiers.storage.objects)
            self.cache.check_hicache_events()

    def launch(self, batch: ScheduleBatch) -> None:
        """Launch the forward pass of a batch."""
        worker = types.SimpleNamespace(model_runner=self.runner)
        model_runner.forward_batch_generation(lambda _worker, batch: self.wait_and_forward(batch), worker, batch)

    def wait_and_forward(self, batch: ScheduleBatch) -> None:
        """Run the forward pass after loads, for which attention would wait if it reads chunks. Decode, as a CUDA graph,
        waits for none."""
        if self.has_tiers and self.rows.segment_table.current is not None and not batch.forward_mode.is_decode():
            for layer in range(self.cache.tiers.host.memory.num_layers):
                self.cache.tiers.transfers.wait(layer)
        self.forward(batch)

    # Overridden by recorders

    def forward(self, batch: ScheduleBatch) -> None:
        """The forward pass of a batch."""

    def encode(self, encodings: Sequence[Encoding]) -> None:
        """The encoder's pass."""

    def copy_rotated(self, caches: Any, source, target, rotations):
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

"""Runs one request at a time through the scheduler without a model, from arrival to end, timing each step."""

import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from fakes.pools import Pools
from fakes.scheduler import Scheduler
from sglang_lazy.cache.host_memory import HostMemory, Piece
from sglang_lazy.cache.transfers import Transfers
from sglang_lazy.core.keys import Namespace, as_int32, chunk_key
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import fill_of
from sglang_lazy.port.scheduler import internal
from sglang_lazy.port.scheduler.chunk_metrics import ChunkMetrics

STEPS = ("arrival", "admission", "layout", "batch", "launch", "publish", "finish", "metrics", "eviction")
VOCAB_SIZE = 128256
MAX_CHUNKS = 64
MAX_FILL_TOKENS = 8192
"""SGLang's default prefill batch size on a GPU with the H200's memory: the limit of a fill of several chunks."""


class Clock:
    """Nanoseconds of this thread by step; a nested step counts only towards itself.

    Used as `with clock(step):`. One object serves all steps, because its own time counts towards theirs.
    """

    def __init__(self):
        self.steps: dict[str, int] = defaultdict(int)
        self._under_way: list[list] = []  # for each step: its name, its start, the time of nested steps

    def __call__(self, step: str) -> "Clock":
        self._under_way.append([step, time.thread_time_ns(), 0])
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exception) -> None:
        step, begin, within = self._under_way.pop()
        spent = time.thread_time_ns() - begin
        self.steps[step] += spent - within
        if self._under_way:
            self._under_way[-1][2] += spent


class NoCopies:
    """Copies nothing: that would be the work of other streams."""

    def plan(self, pieces: Sequence[Piece]) -> None:
        pass

    def load(self, plan: None, layer: int) -> None:
        pass

    def back_up(self, plan: None) -> None:
        pass


class HostPools(Pools):
    tree_core = None

    def new_transfers(self, memory: HostMemory) -> Transfers:
        return Transfers(memory, NoCopies())


class Host(Scheduler):
    """A scheduler whose prefill batches are not limited, over pools that record nothing.

    stock: whether the cache is SGLang's own alone.
    evicted: leaves evicted from our tree, and evictions from SGLang's, so far.
    filled: chunks computed so far.
    """

    metrics: ChunkMetrics | None = None
    """Published after each batch, as SGLang does with `--enable-metrics`."""

    def __init__(self, stock: bool, pool_size: int, context_len: int, device: str, host_size: int = 0):
        pools = HostPools(
            pool_size,
            num_rows=MAX_CHUNKS,
            context_len=context_len,
            max_chunks=MAX_CHUNKS,
            vocab_size=VOCAB_SIZE,
            stock=stock,
            device=device,
            host_size=host_size,
        )
        super().__init__(pools, chunked_prefill_size=MAX_FILL_TOKENS, max_chunks=MAX_CHUNKS)
        self.clock = Clock()
        self.chunked_prefill_size = None
        self.evicted, self.filled = 0, 0
        if stock:
            self._time_evictions(self.tree_cache, "evict_for_alloc")
        else:
            room, store = self.tree_cache.room, self.tree_cache.store
            self._time_evictions(room, "plain_gives")
            room.evict, store.device.take = self._timed("eviction", room.evict), self._timed("eviction", room.take)
            store.evicted = self._counted(store.evicted)

        adder, batch = self.get_prefill_adder_class(), self.batch_class
        timed_adder = type("Adder", (adder,), {"add_one_req": self._timed("batch", adder.add_one_req)})
        prepare = {"prepare_for_extend": self._timed("batch", batch.prepare_for_extend)}
        self.get_prefill_adder_class, self.batch_class = lambda: timed_adder, type("Batch", (batch,), prepare)
        self._lay_out = self._timed("layout", Req.init_next_round_input)

    def _timed(self, step: str, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            with self.clock(step):
                return function(*args, **kwargs)

        return timed

    def _time_evictions(self, cache: Any, name: str) -> None:
        evict = getattr(cache, name)

        def counted(*args, **kwargs):
            with self.clock("eviction"):
                result = evict(*args, **kwargs)
            self.evicted += result.num_tokens_evicted > 0
            return result

        setattr(cache, name, counted)

    def _counted(self, take_off: Callable) -> Callable:
        """Wrap a method that is told of each leaf that leaves the device, to count calls."""

        def counted(leaf):
            self.evicted += 1
            return take_off(leaf)

        return counted

    def publish_metrics(self) -> None:
        """Publish metrics from here on."""
        from prometheus_client import REGISTRY  # not before `main` has named the folder

        for name in list(REGISTRY._names_to_collectors):  # those of an earlier host
            if name.startswith("sglang_lazy:") and name in REGISTRY._names_to_collectors:
                REGISTRY.unregister(REGISTRY._names_to_collectors[name])
        self.metrics = ChunkMetrics(self.tree_cache.store, {"model_name": "none", "tp_rank": 0})

    def insert(self, tokens: array, known: torch.Tensor | None = None) -> torch.Tensor:
        """Make `tokens` resident in SGLang's tree, the first ones in the slots `known`; returns all slots."""
        known = torch.empty(0, dtype=torch.int64, device=self.pools.slots.device) if known is None else known
        slots = torch.cat([known, self.pools.slots.alloc(len(tokens) - len(known))])
        self.tree_cache.insert(InsertParams(key=RadixKey(tokens), value=slots, prev_prefix_len=len(known)))
        return slots

    def insert_chunk(self, tokens: array) -> None:
        """Make `tokens` resident as a chunk; with a host tier, this may evict an earlier one from the device."""
        key, store = chunk_key(as_int32(tokens), Namespace("chunk", None, None)), self.tree_cache.store
        chunk = ChunkSlice(key, 0, tokens, 0, len(tokens), ((0, len(tokens)),))
        if self.pools.slots.available_size() < len(tokens):
            self.tree_cache.check_hicache_events()
            self.tree_cache.evict(EvictParams(num_tokens=len(tokens)))
        inserted = store.insert(chunk, self.pools.slots.alloc(len(tokens)))
        store.back_up([inserted.node])

    def serve(self, req: Req) -> dict[str, int]:
        """Run `req` until its first token, then end it; returns the nanoseconds of each step."""
        self.clock.steps.clear()
        with self.clock("arrival"):
            self._add_request_to_queue(req)
        while self.waiting_queue:
            with self.clock("admission"), mock.patch.object(Req, "init_next_round_input", self._lay_out):
                self._process_hicache_events()
                batch, _ = self._get_new_batch_prefill_raw(None, self.running_batch)
            with self.clock("launch"):
                self.pools.launch(batch)
            reqs = list(batch.reqs)
            self.filled += sum(len(fill.chunks) for fill in map(fill_of, reqs) if fill is not None)
            with self.clock("publish"):
                internal.get_next_batch_to_run(Host.publish, self, self.running_batch, batch)
            with self.clock("finish"):
                for ended in reqs:
                    ended.update_finish_state()
                    release_kv_cache(ended, self.tree_cache, checkpoint=True)
            if self.metrics is not None:
                with self.clock("metrics"):
                    self.metrics.publish()
        return dict(self.clock.steps)

    def publish(self, _running_batch, batch) -> None:
        """Insert what `batch` computed into the tree; admission has already done so for fills, which have left the
        batch."""
        for req in batch.reqs:
            assert fill_of(req) is None
            checkpoint_kv_cache(req, self.tree_cache)
            req.output_ids.append(0)

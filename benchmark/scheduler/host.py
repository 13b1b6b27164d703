"""Runs one request at a time through the scheduler without a model, from arrival to end, timing each step."""

import time
from array import array
from collections import defaultdict
from collections.abc import Callable

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from fakes.pools import Pools
from fakes.scheduler import Scheduler
from sglang_lazy.core.keys import Namespace, as_int32, chunk_key
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import fill_of
from sglang_lazy.port.cache.host_pool import CpuHostPool
from sglang_lazy.port.scheduler import internal
from sglang_lazy.port.scheduler.chunk_metrics import ChunkMetrics

STEPS = ("arrival", "admission", "layout", "batch", "segments", "publish", "finish", "metrics", "eviction")
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


class NoHostMemory(CpuHostPool):
    """A host pool that only tracks its slots: copying would be the work of other streams."""

    def init_kv_buffer(self) -> torch.Tensor:
        return torch.empty(2, 1, self.layer_num, 1, 1).expand(-1, self.size, -1, -1, -1)

    def load_to_device_per_layer(self, *_args) -> None:
        pass

    def backup_from_device_all_layer(self, *_args) -> None:
        pass


class HostPools(Pools):
    host_pool_class = NoHostMemory


class Host(Scheduler):
    """A scheduler whose prefill batches are not limited, over pools that record nothing.

    evicted: leaves evicted from the device so far.
    filled: chunks computed so far.
    """

    metrics: ChunkMetrics | None = None
    """Published after each batch, as SGLang does with `--enable-metrics`."""

    def __init__(
        self, cache_class: type[RadixCache], pool_size: int, context_len: int, device: str, host_size: int = 0
    ):
        pools = HostPools(
            pool_size,
            num_rows=MAX_CHUNKS,
            context_len=context_len,
            max_chunks=MAX_CHUNKS,
            vocab_size=VOCAB_SIZE,
            cache_class=cache_class,
            device=device,
            host_size=host_size,
        )
        super().__init__(pools, chunked_prefill_size=MAX_FILL_TOKENS, max_chunks=MAX_CHUNKS, clock=Clock())
        self.chunked_prefill_size = None
        self.evicted, self.filled = 0, 0
        evict = self.tree_cache.evict

        def timed_evict(params):
            with self.clock("eviction"):
                return evict(params)

        self.tree_cache.evict = timed_evict
        for name in ("_delete_leaf", "_detach_backuped") if pools.has_tiers else ("_delete_leaf",):
            setattr(self.tree_cache, name, self._counted(getattr(self.tree_cache, name)))

    def _counted(self, take_off: Callable) -> Callable:
        """Wrap a method that evicts a leaf from the device, to count calls."""

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
        """Make `tokens` resident, the first ones in the slots `known`; returns all slots."""
        new = self.pools.slots.alloc(len(tokens) - (0 if known is None else len(known)))
        slots = new if known is None else torch.cat([known, new])
        self.tree_cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        return slots

    def insert_chunk(self, tokens: array) -> None:
        """Make `tokens` resident as a chunk; with a host tier, this may evict an earlier one from the device."""
        key = chunk_key(as_int32(tokens), Namespace("chunk", None, None))
        chunk = ChunkSlice(key, 0, tokens, 0, len(tokens), ((0, len(tokens)),))
        if self.pools.slots.available_size() < len(tokens):
            self.tree_cache.check_hicache_events()
            self.tree_cache.evict(EvictParams(num_tokens=len(tokens)))
        inserted = self.tree_cache.store.insert(chunk, self.pools.slots.alloc(len(tokens)))
        self.tree_cache.back_up([inserted.node])

    def serve(self, req: Req) -> dict[str, int]:
        """Run `req` until its first token, then end it; returns the nanoseconds of each step."""
        self.clock.steps.clear()
        with self.clock("arrival"):
            self._add_request_to_queue(req)
        while self.waiting_queue:
            with self.clock("admission"):
                batch, _ = self.next_prefill_batch(self.running_batch)
            reqs = list(batch.reqs)
            self.filled += sum(len(fill.chunks) for fill in map(fill_of, reqs) if fill is not None)
            with self.clock("publish"):
                internal.get_next_batch_to_run(Host.publish, self, self.running_batch, batch)
            with self.clock("finish"):
                for ended in reqs:
                    release_kv_cache(ended, self.tree_cache)
            if self.metrics is not None:
                with self.clock("metrics"):
                    self.metrics.publish()
        return dict(self.clock.steps)

    def publish(self, _running_batch, batch) -> None:
        """Insert what `batch` computed into the tree; admission has already done so for fills, which have left the
        batch."""
        for req in batch.reqs:
            assert fill_of(req) is None
            req.output_ids.append(0)
            self.tree_cache.cache_unfinished_req(req)

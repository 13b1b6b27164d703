"""Runs one request at a time through the scheduler without a model, from arrival to end, timing each step."""

import functools
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixKey

from fakes.pools import Pools
from fakes.scheduler import Scheduler
from sglang_lazy.cache.host_memory import HostMemory
from sglang_lazy.cache.host_slots import HostSlots
from sglang_lazy.cache.transfers import Transfers
from sglang_lazy.chunks.metrics import ChunkMetrics
from sglang_lazy.core.keys import Namespace, as_int32, chunk_key
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.core.state import fill_of
from sglang_lazy.port.scheduler import steps
from sglang_lazy.storage import tiers

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

    def timed(self, step: str, function: Callable) -> Callable:
        """`function`, as a step."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(step):
                return function(*args, **kwargs)

        return timed

    def timing(self, base: type, **steps: str) -> type:
        """A subclass of `base`, some of whose methods are steps."""
        return type(
            base.__name__, (base,), {name: self.timed(step, getattr(base, name)) for name, step in steps.items()}
        )


class SlotsAlone(HostMemory):
    """A host that only tracks its slots: copying would be the work of other streams."""

    def __init__(self, num_slots: int, layers: Sequence[Sequence[torch.Tensor]], _num_slots: int):
        super().__init__(layers, 0)
        self.slots = HostSlots(num_slots)

    def plan(self, _pieces: Any) -> None:
        pass

    load = back_up = lambda *_args: None


class HostPools(Pools):
    tree_core = None

    def __init__(self, *args: Any, host_size: int, **options: Any):
        with mock.patch.object(tiers, "HostMemory", functools.partial(SlotsAlone, host_size)):
            super().__init__(*args, host_size=host_size, **options)

    def new_transfers(self, memory: HostMemory, states: HostMemory | None = None) -> Transfers:
        return Transfers(memory, memory)


class StockPools(HostPools):
    reuses = False


class Host(Scheduler):
    """A scheduler whose prefill batches are not limited, over pools that record nothing.

    reuses: whether chunks are served; else the cache is SGLang's own.
    evicted: tokens evicted from the device so far.
    filled: chunks computed so far.
    """

    metrics: ChunkMetrics | None = None
    """Published after each batch, as SGLang does with `--enable-metrics`."""

    def __init__(self, reuses: bool, pool_size: int, context_len: int, device: str, host_size: int = 0):
        pools = (HostPools if reuses else StockPools)(
            pool_size,
            num_rows=MAX_CHUNKS,
            context_len=context_len,
            max_chunks=MAX_CHUNKS,
            vocab_size=VOCAB_SIZE,
            device=device,
            host_size=host_size,
        )
        super().__init__(pools, chunked_prefill_size=MAX_FILL_TOKENS, max_chunks=MAX_CHUNKS)
        self.chunked_prefill_size = None
        self.evicted, self.filled = 0, 0
        self.clock = clock = Clock()
        self.batch_class = clock.timing(self.batch_class, prepare_for_extend="batch")
        self.adder_class = clock.timing(self.adder_class, add_one_req="batch")
        self.request_class = clock.timing(Req, init_next_round_input="layout")
        cache = self.tree_cache
        if reuses:
            cache.room.evict = self._counted(cache.room.evict, lambda given: given.tokens)
            cache.store.device.take = self._counted(cache.store.device.take, len)
        else:
            cache.evict_for_alloc = self._counted(cache.evict_for_alloc, lambda given: given.num_tokens_evicted)

    def _counted(self, evict: Callable, count: Callable[[Any], int]) -> Callable:
        """Wrap a function that evicts, to time it and to count the tokens of its result."""

        def counted(*args: Any) -> Any:
            with self.clock("eviction"):
                result = evict(*args)
            self.evicted += count(result)
            return result

        return counted

    def publish_metrics(self) -> None:
        """Publish metrics from here on."""
        from prometheus_client import REGISTRY  # not before `main` has named the folder

        for name in list(REGISTRY._names_to_collectors):  # those of an earlier host
            if name.startswith("sglang_lazy:") and name in REGISTRY._names_to_collectors:
                REGISTRY.unregister(REGISTRY._names_to_collectors[name])
        self.metrics = ChunkMetrics(self.tree_cache.store, {"model_name": "none", "tp_rank": 0})

    def insert(self, tokens: array, known: torch.Tensor | None = None) -> torch.Tensor:
        """Make `tokens` resident as text of prompts without chunks, the first ones in the slots `known`; returns all
        slots."""
        new, cache = self.pools.slots.alloc(len(tokens) - (0 if known is None else len(known))), self.tree_cache
        slots = new if known is None else torch.cat([known, new])
        cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        if self.pools.reuses:
            cache.room.mirror.touch(tokens, (None, None), next(cache.tree._clock))
        return slots

    def insert_chunk(self, tokens: array) -> None:
        """Make `tokens` resident as a chunk; with a host tier, this may evict an earlier one from the device."""
        key = chunk_key(as_int32(tokens), Namespace("chunk", None, None))
        chunk = ChunkSlice(key, 0, tokens, 0, len(tokens), ((0, len(tokens)),))
        store = self.tree_cache.store
        self.pools.take_acknowledgements()
        inserted = store.insert(chunk, store.device.allocate(len(tokens)))
        store.back_up([inserted.node])

    def serve(self, req: Req) -> dict[str, int]:
        """Run `req` until its first token, then end it; returns the nanoseconds of each step."""
        self.clock.steps.clear()
        with self.clock("arrival"):
            self._add_request_to_queue(req)
        while self.waiting_queue:
            with self.clock("admission"):
                self._process_hicache_events()
                batch, _ = self._get_new_batch_prefill_raw(None, self.running_batch)
            reqs = list(batch.reqs)
            self.filled += sum(len(fill.chunks) for fill in map(fill_of, reqs) if fill is not None)
            with self.clock("segments"):
                self.pools.launch(batch)
            with self.clock("publish"):
                steps.get_next_batch_to_run(Host.publish, self, self.running_batch, batch)
            with self.clock("finish"):
                for ended in reqs:
                    release_kv_cache(ended, self.tree_cache, checkpoint=True)
            if self.metrics is not None:
                with self.clock("metrics"):
                    self.metrics.publish()
        return dict(self.clock.steps)

    def publish(self, _running_batch: Any, batch: Any) -> None:
        """Insert what `batch` computed into the tree; admission has already done so for fills, which have left the
        batch."""
        for req in batch.reqs:
            assert fill_of(req) is None
            req.output_ids.append(0)
            checkpoint_kv_cache(req, self.tree_cache)

"""A scheduler without a model: SGLang's classes and our hooks take one request at a time from arrival to its end."""

import contextlib
import inspect
import time
import types
from array import array
from collections import defaultdict
from collections.abc import Iterator

import torch
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sgl_kernel_lazy import get_implementation
from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable, table_of
from sglang_lazy.core.model import ServedModel
from sglang_lazy.core.prompt import LinkedPrompt
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.core.state import fill_of
from sglang_lazy.policies import get_policy
from sglang_lazy.port import plugin
from sglang_lazy.port import scheduler as hooks
from sglang_lazy.port.model_runner import involves_chunks
from sglang_lazy.port.radix import LazyRadixCache

STEPS = ("arrival", "admission", "layout", "batch", "segments", "publish", "finish", "eviction")
VOCAB_SIZE = 128256
MAX_CHUNKS = 64
CHUNKED_PREFILL_SIZE = 8192
"""SGLang's default on a GPU of the H200's memory; here a batch may have more tokens, but no fill of several chunks."""


@contextlib.contextmanager
def published(device: str = "cpu") -> Iterator[None]:
    """SGLang's default flags for `device`, which its modules ask a global configuration for."""
    plugin.provide_rotary_import()
    backend = "torch_native" if device == "cpu" else "triton"
    flags = ServerArgs(model_path="dummy", device=device, attention_backend=backend)
    runtime_context.publish(flags, role="scheduler")
    try:
        yield
    finally:
        runtime_context.reset_context()


class Clock:
    """Nanoseconds of this thread by step; a step within another counts for itself alone.

    Used as `with clock(step):`. It is one object for all of them, since what it takes itself counts for the steps.
    """

    def __init__(self):
        self.steps: dict[str, int] = defaultdict(int)
        self._under_way: list[list] = []  # of each step: its name, when it began, how long steps within it took

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


class Host:
    """What admission and hooks see of SGLang's scheduler, over real pools on a device.

    evicted: leaves taken out of the tree so far.
    filled: chunks computed so far.
    """

    def __init__(self, cache_class: type[RadixCache], pool_size: int, context_len: int, device: str):
        self.rows = ReqToTokenPool(MAX_CHUNKS, context_len, device, enable_memory_saver=False)
        self.slots = TokenToKVPoolAllocator(pool_size, torch.bfloat16, device, None, need_sort=False)
        self.tree_cache = cache_class(
            CacheInitParams(
                disable=False, req_to_token_pool=self.rows, token_to_kv_pool_allocator=self.slots, page_size=1
            )
        )
        self.waiting_queue: list[Req] = []
        self.running_batch = ScheduleBatch(reqs=[])
        self.chunked_req = self.tokenizer = None
        self.chunked_prefill_size = CHUNKED_PREFILL_SIZE
        self.model_config = types.SimpleNamespace(
            vocab_size=VOCAB_SIZE, hf_eos_token_id=set(), is_encoder_decoder=False
        )
        self.new_token_ratio_tracker = types.SimpleNamespace(current=0.7)
        if isinstance(self.tree_cache, LazyRadixCache):
            self.tree_cache.admission = hooks.new_admission(self, MAX_CHUNKS)
            model = ServedModel({}, {}, get_implementation("torch"))  # none: nothing is computed
            self.rows.segment_table = SegmentTable(len(self.rows.req_to_token), MAX_CHUNKS, device, model)
        self.clock, self.evicted, self.filled = Clock(), 0, 0
        evict, delete_leaf = self.tree_cache.evict, self.tree_cache._delete_leaf

        def timed_evict(params):
            with self.clock("eviction"):
                return evict(params)

        def counted_delete(leaf):
            self.evicted += 1
            delete_leaf(leaf)

        self.tree_cache.evict, self.tree_cache._delete_leaf = timed_evict, counted_delete

    def insert(self, tokens: array, known: torch.Tensor | None = None) -> torch.Tensor:
        """Make `tokens` resident, the first of them in the slots `known`; returns all their slots."""
        new = self.slots.alloc(len(tokens) - (0 if known is None else len(known)))
        slots = new if known is None else torch.cat([known, new])
        self.tree_cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
        return slots

    def insert_chunk(self, tokens: array) -> None:
        """Make `tokens` resident as a chunk."""
        prompt, layout = tokens + array("q", [0]), PromptLayout(((0, len(tokens)),))
        kept = get_policy(layout.link).kept(layout, prompt)
        (chunk,) = LinkedPrompt.build(prompt, layout, kept, None).chunks
        self.tree_cache.store.insert(chunk, self.slots.alloc(len(tokens)))

    def serve(self, req: Req) -> dict[str, int]:
        """Take `req` to its first token and end it there; returns the nanoseconds of each step."""
        self.clock.steps.clear()
        with self.clock("arrival"):
            hooks.add_request_to_queue(Host.enqueue, self, req)
        while self.waiting_queue:
            with self.clock("admission"):
                batch, _ = hooks.get_new_batch_prefill_raw(Host.form_batch, self, None, self.running_batch)
            reqs = list(batch.reqs)
            self.filled += sum(len(fill.chunks) for fill in map(fill_of, reqs) if fill is not None)
            with self.clock("publish"):
                hooks.get_next_batch_to_run(Host.publish, self, self.running_batch, batch)
            with self.clock("finish"):
                for ended in reqs:
                    release_kv_cache(ended, self.tree_cache)
        return dict(self.clock.steps)

    # What SGLang's scheduler does inside the hooks

    def enqueue(self, req: Req) -> None:
        self.waiting_queue.append(req)

    def form_batch(self, _delayer, running_batch: ScheduleBatch) -> tuple[ScheduleBatch, ScheduleBatch]:
        adder = PrefillAdder(1, self.tree_cache, self.slots, running_batch, 0.7, 1 << 30, None)
        for req in self.waiting_queue:
            with self.clock("layout"):
                req.init_next_round_input(self.tree_cache)
            with self.clock("batch"):
                adder.add_one_req(req, False, None)
        with self.clock("batch"):
            self.waiting_queue = [req for req in self.waiting_queue if req not in adder.can_run_list]
            batch = ScheduleBatch.init_new(
                adder.can_run_list, self.rows, self.slots, self.tree_cache, self.model_config, True,
                SpeculativeAlgorithm.NONE,
            )  # fmt: skip
            # Without the hook that is timed below, which is in place where this process has run an engine.
            inspect.unwrap(ScheduleBatch.prepare_for_extend)(batch)
        with self.clock("segments"):
            hooks.prepare_for_extend(None, batch)
            table = table_of(self.rows)
            if table is not None and involves_chunks(batch, table):
                LinkedBatch.of(batch)
        return batch, running_batch

    def publish(self, running_batch: ScheduleBatch, batch: ScheduleBatch) -> None:
        """What was computed in `batch` is given to the tree; admission has done so with fills, which left it."""
        for req in batch.reqs:
            assert fill_of(req) is None
            req.output_ids.append(0)
            self.tree_cache.cache_unfinished_req(req)

"""SGLang's scheduling loop without processes or a model: its batches, its prefill budget and our hooks."""

import contextlib
import inspect
import types
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.runtime_context import get_server_args

from fakes.pools import Pools
from fakes.requests import NEUTRAL_PREAMBLE
from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.core.state import is_internal
from sglang_lazy.port.cache.radix import LazyRadixCache
from sglang_lazy.port.repairs import operators
from sglang_lazy.port.scheduler import internal, lora, memory, schedule_policy
from sglang_lazy.port.scheduler import steps as hooks


def untimed(_step: str) -> AbstractContextManager:
    return contextlib.nullcontext()


class Policy(SchedulePolicy):
    """SGLang's policy with our hooks applied once, even if an engine in this process has installed them."""

    def calc_priority(self, waiting_queue: list[Req], running_batch: ScheduleBatch | None = None) -> None:
        schedule_policy.calc_priority(inspect.unwrap(SchedulePolicy.calc_priority), self, waiting_queue, running_batch)

    def _compute_prefix_matches(self, waiting_queue: list[Req], policy: Any) -> set[str]:
        found = inspect.unwrap(SchedulePolicy._compute_prefix_matches)(self, waiting_queue, policy)
        return schedule_policy.compute_prefix_matches(found, self, waiting_queue, policy)


class Scheduler:
    """The part of SGLang's scheduler that hooks and admission use.

    overlap: process the result of a batch only after launching the next one.
    max_adapters: how many LoRA adapters a batch may have, counting the base model.
    policy: the order of the queue.  prioritizes: whether requests have priorities and preempt others.
    max_running: the most requests that run at once.
    clock: a context manager around each step of batch formation; takes the step's name.
    loading: adapters that SGLang is still loading; the first check finds them not ready.
    unloaded: adapters that have been unloaded.
    log: the ids of the requests in each launched batch.
    """

    def __init__(
        self,
        pools: Pools,
        *,
        chunked_prefill_size: int = 64,
        overlap: bool = False,
        max_chunks: int = 8,
        max_adapters: int = 8,
        policy: str = "fcfs",
        prioritizes: bool = False,
        max_running: int = 1000,
        clock: Callable[[str], AbstractContextManager] = untimed,
    ):
        self.pools, self.tree_cache, self.server_args = pools, pools.cache, get_server_args()
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pools.rows, pools.slots
        self.chunked_prefill_size, self.overlap, self.clock = chunked_prefill_size, overlap, clock
        self.max_adapters, self.loading, self.unloaded = max_adapters, set(), []
        self.prioritizes, self.max_running = prioritizes, max_running
        self.schedule_low_priority_values_first = False
        self.policy = Policy(policy, self.tree_cache, pools.has_tiers, prioritizes, False)
        self.model_config, self.tokenizer = pools.model_config, None
        self.new_token_ratio_tracker = types.SimpleNamespace(current=1.0)
        self.waiting_queue: list[Req] = []
        self._engine_paused = False
        self.grammar_manager = types.SimpleNamespace(grammar_queue=[])
        self.running_batch, self.last_batch = ScheduleBatch(reqs=[]), None
        self.chunked_req, self._pending_chunked_abort_req = None, None
        self.results: list[tuple[bool, list[Req]]] = []
        self.log: list[list[str]] = []
        self.max_prefill_bs = 0
        if isinstance(self.tree_cache, LazyRadixCache):
            cross_attention = pools.chunk_slots is not pools.slots
            self.tree_cache.admission = self.admission = hooks.new_admission(
                self,
                max_chunks,
                ServerTraits(cross_attention=cross_attention),
                array("q", NEUTRAL_PREAMBLE),
                encode=pools.encode if cross_attention else None,
            )

    # Arrival

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        def enqueue(_scheduler: Any, req: Req) -> None:
            if self.prioritizes and req.priority is None:
                req.priority = -(1 << 62)
            self.waiting_queue.append(req)
            req.time_stats.set_wait_queue_entry_time()

        hooks.add_request_to_queue(enqueue, self, req)

    def abort(self, req: Req) -> None:
        """Remove a waiting request from the queue without notifying admission, as SGLang does."""
        self.waiting_queue.remove(req)

    def abort_chunked(self) -> Req:
        """Have the next step release the request in chunked prefill, as SGLang does; returns the request."""
        self._pending_chunked_abort_req = self.chunked_req
        return self.chunked_req

    def unload(self, adapter: str) -> None:
        """Unload an adapter, now or as soon as nothing uses it: then it is in `unloaded`."""
        self._request_dispatcher(types.SimpleNamespace(lora_id=adapter))

    def _request_dispatcher(self, message: Any) -> Any:
        return lora.unload_adapter(lambda _self, message: self.unloaded.append(message.lora_id), self, message)

    # The loop

    def step(self) -> None:
        operators.handle_postponed(None, self, [])
        self.running_batch, batch = internal.get_next_batch_to_run(
            type(self).next_batch, self, self.running_batch, self.last_batch
        )
        if batch is not None:
            self.log.append([req.rid for req in batch.reqs])
            self.results.append((batch.forward_mode.is_extend(), list(batch.reqs)))
        while len(self.results) > (self.overlap and batch is not None):
            self.process_result(*self.results.pop(0))
        self.last_batch = batch
        if batch is None:
            hooks.on_idle(None, self)

    def run(self, max_steps: int = 200) -> None:
        """Take steps until every request is answered."""
        for _ in range(max_steps):
            self.step()
            if self.is_fully_idle():
                return
        raise AssertionError(f"hangs with {[req.rid for req in self.waiting_queue]} waiting")

    def is_fully_idle(self) -> bool:
        def stock(*_: Any) -> bool:
            last_done = self.last_batch is None or self.last_batch.is_empty()
            cache, idle = self.tree_cache, not (self.chunked_req or self.waiting_queue)
            copying = self.pools.has_tiers and (cache.ongoing_write_through or cache.ongoing_load_back)
            return last_done and self.running_batch.is_empty() and idle and not copying

        return hooks.is_fully_idle(stock, self)

    def next_batch(
        self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None
    ) -> tuple[ScheduleBatch, ScheduleBatch | None]:
        """As `Scheduler.get_next_batch_to_run`, with the running batch first."""
        self.process_pending_chunked_abort()
        if self.chunked_req is not None and self.chunked_req.extend_range.end > len(self.chunked_req.prefix_indices):
            self.tree_cache.cache_unfinished_req(self.chunked_req, chunked=True)
        if last_batch is not None and last_batch.forward_mode.is_extend():
            size = last_batch.batch_size()
            last_batch.filter_batch([req for req in (self.chunked_req, last_batch.chunked_req) if req is not None])
            if last_batch.batch_size() < size:
                running_batch.batch_is_full = False
            if running_batch.is_empty():
                running_batch = running_batch if last_batch.is_empty() else last_batch
            elif not last_batch.is_empty():
                running_batch.merge_batch(last_batch)
        batch, running_batch = self.next_prefill_batch(running_batch)
        if batch is None and not running_batch.is_empty():
            batch = memory.update_running_batch(type(self).decode_batch, self, running_batch)
        return running_batch, batch

    def process_pending_chunked_abort(self) -> None:
        """As SGLang's."""
        if self._pending_chunked_abort_req is not None and self._pending_chunked_abort_req is self.chunked_req:
            self.chunked_req.finished_reason = FINISH_ABORT()
            release_kv_cache(self.chunked_req, self.tree_cache, is_insert=False)
            self.chunked_req = None
        self._pending_chunked_abort_req = None

    def next_prefill_batch(self, running_batch: ScheduleBatch) -> tuple[ScheduleBatch | None, ScheduleBatch]:
        return hooks.get_new_batch_prefill_raw(type(self).form_batch, self, None, running_batch)

    def form_batch(self, _delayer: None, running_batch: ScheduleBatch) -> tuple[ScheduleBatch | None, ScheduleBatch]:
        """As `Scheduler._get_new_batch_prefill_raw`."""
        self.pools.take_acknowledgements()
        if self.prioritizes:
            running_batch.batch_is_full = False
        if (running_batch.batch_is_full or not self.waiting_queue) and self.chunked_req is None:
            return None, running_batch
        if self.room(running_batch) <= 0 and self.chunked_req is None and not self.prioritizes:
            running_batch.batch_is_full = True
            return None, running_batch
        self.policy.calc_priority(self.waiting_queue, running_batch)
        ratio, flags = self.new_token_ratio_tracker.current, get_server_args()
        adder = PrefillAdder(
            1, self.tree_cache, self.pools.slots, running_batch, ratio, 1 << 30, self.chunked_prefill_size
        )
        if self.chunked_req is not None:
            self.chunked_req.init_next_round_input()
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
        adapters = {req.lora_id for req in (*running_batch.reqs, *adder.can_run_list) if not req.finished()}
        for req in self.waiting_queue:
            if not lora.can_schedule(type(self).adapter_fits, self, req, adapters):
                continue
            if len(adder.can_run_list) >= self.room(running_batch):
                running_batch.batch_is_full = True
            if running_batch.batch_is_full and not (
                self.prioritizes
                and schedule_policy.preempt_to_schedule(
                    inspect.unwrap(PrefillAdder.preempt_to_schedule), adder, req, flags
                )
            ):
                break
            with self.clock("layout"):
                req.init_next_round_input(self.tree_cache)
            with self.clock("batch"):
                result = schedule_policy.add_one_req(
                    inspect.unwrap(PrefillAdder.add_one_req), adder, req, self.chunked_req is not None, None
                )
            adapters.add(req.lora_id)
            if result != AddReqResult.CONTINUE:
                running_batch.batch_is_full = result == AddReqResult.NO_TOKEN
                break
        if not adder.can_run_list:
            return None, running_batch
        taken = set(adder.can_run_list)
        self.waiting_queue = [req for req in self.waiting_queue if req not in taken]
        for req in adder.preempt_list:
            self._add_request_to_queue(req)
        self.max_prefill_bs = max(self.max_prefill_bs, len(taken))
        self.chunked_req = adder.new_chunked_req or self.chunked_req
        if self.chunked_req is not None:
            self.chunked_req.inflight_middle_chunks += 1
        with self.clock("batch"):
            batch = self.pools.new_batch(adder.can_run_list, self.chunked_req, self.overlap)
            if self.pools.has_tiers:
                batch.hicache_consumer_index = self.tree_cache.ready_to_load_host_cache()
            self.pools.assign_rows(batch)
        with self.clock("segments"):
            self.pools.launch(batch)
        return batch, running_batch

    def room(self, running_batch: ScheduleBatch) -> int:
        """As `Scheduler.get_num_allocatable_reqs`."""
        return min(self.pools.rows.available_size(), self.max_running - len(running_batch.reqs))

    def adapter_fits(self, req: Req, adapters: set[str | None]) -> bool:
        """As `Scheduler._can_schedule_lora_req`."""
        if req.lora_id in adapters:
            return True
        if req.lora_id in self.loading:
            self.loading.remove(req.lora_id)
            return False
        return len({req.lora_id} | adapters) <= self.max_adapters

    def decode_batch(self, running_batch: ScheduleBatch) -> ScheduleBatch | None:
        """As `Scheduler.update_running_batch`."""
        size = running_batch.batch_size()
        running_batch.filter_batch()
        if not running_batch.is_empty() and not running_batch.check_decode_mem():
            retracted, _, aborted = running_batch.retract_decode(get_server_args())
            assert not aborted, "SGLang: out of memory even after retracting all others"
            for req in retracted:
                self._add_request_to_queue(req)
        if running_batch.batch_size() < size:
            running_batch.batch_is_full = False
        if running_batch.is_empty():
            return None
        running_batch.prepare_for_decode()
        self.pools.launch(running_batch)
        return running_batch

    def process_result(self, was_prefill: bool, reqs: list[Req]) -> None:
        """Append a generated token to every request of the batch whose prompt is complete."""
        for req in reqs:
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
            elif not req.finished() and not req.is_retracted:
                req.output_ids.append(0 if is_internal(req) else req.future[len(req.output_ids)])
                req.update_finish_state()
                if req.finished():
                    release_kv_cache(req, self.tree_cache)
                elif was_prefill:
                    self.tree_cache.cache_unfinished_req(req)

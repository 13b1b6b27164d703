"""SGLang's scheduler without processes or a model: its own loop, batches and prefill budget, and our hooks."""

import collections
import inspect
import types
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.runtime_context import get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from fakes.pools import Pools
from fakes.requests import MIN_CHUNK, NEUTRAL_PREAMBLE
from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.core.state import is_internal
from sglang_lazy.port.hooks import Hook
from sglang_lazy.port.repairs import scheduler as repairs
from sglang_lazy.port.scheduler import control, schedule_policy, upkeep
from sglang_lazy.port.scheduler import steps as hooks


def hooked(base: type, *modules: Any) -> type:
    """A subclass of one of SGLang's classes with the hooks of these modules, each once, even if an engine in this
    process has installed them."""
    prefix, methods = f"{base.__module__}.{base.__qualname__}.", dict[str, Callable]()
    for hook in (hook for module in modules for hook in module.HOOKS):
        name = hook.target.removeprefix(prefix)
        if name != hook.target and name != "__init__":
            stock = methods.get(name) or inspect.unwrap(getattr(base, name))
            methods[name] = _with_hook(stock, hook)
    return type(base.__name__, (base,), methods)


def _with_hook(stock: Callable, hook: Hook) -> Callable:
    def around(*args: Any, **kwargs: Any) -> Any:
        return hook.function(stock, *args, **kwargs)

    def after(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        changed = hook.function(result, *args, **kwargs)
        return result if changed is None else changed

    return {"AROUND": around, "AFTER": after}[hook.kind]


Batch = hooked(ScheduleBatch, hooks)
_Policy, Adder = hooked(SchedulePolicy, schedule_policy), hooked(PrefillAdder, schedule_policy)
_Stock = hooked(sglang_scheduler.Scheduler, hooks, control, schedule_policy, upkeep)
_NOTHING = types.SimpleNamespace


def _ignored(*_args: Any, **_options: Any) -> None:
    """Stands in for what does nothing here."""


def _same(batch: Any, **_options: Any) -> Any:
    return batch


class Scheduler(_Stock):
    """SGLang's scheduler over `pools`, with hooks and admission.

    overlap: process the result of a batch only after launching the next one.
    max_adapters: how many LoRA adapters a batch may have, counting the base model.
    policy: the order of the queue.  prioritizes: whether requests have priorities and preempt others.
    max_running: the most requests that run at once.
    loading: adapters that SGLang is still loading; the first check finds them not ready.
    unloaded: adapters that have been unloaded.
    log: the ids of the requests in each launched batch.
    """

    batch_class, adder_class = Batch, Adder

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
    ):
        self.pools, self.tree_cache, self.server_args = pools, pools.cache, get_server_args()
        self.req_to_token_pool, self.token_to_kv_pool_allocator = pools.rows, pools.slots
        self.chunked_prefill_size = chunked_prefill_size
        self.max_adapters, self.loading, self.unloaded = max_adapters, set(), []
        self.max_running_requests = max_running
        self.policy = _Policy(policy, self.tree_cache, pools.has_tiers, prioritizes, False)
        self.model_config, self.tokenizer = pools.model_config, None
        self.log: list[list[str]] = []
        self._set_stock(overlap, prioritizes)
        if not pools.reuses:
            return
        cross_attention = pools.chunk_slots is not pools.slots
        self.tree_cache.admission = self.admission = hooks.new_admission(
            self,
            max_chunks,
            ServerTraits(
                cross_attention=cross_attention, recurrent=pools.cache.store.states is not None, min_chunk=MIN_CHUNK
            ),
            array("q", NEUTRAL_PREAMBLE),
            encode=pools.encode if cross_attention else None,
        )

    def _set_stock(self, overlap: bool, prioritizes: bool) -> None:
        """What SGLang's methods read of a scheduler: nothing of it is in use, unless an option says so."""
        self.waiting_queue: list[Req] = []
        self.running_batch, self.last_batch = ScheduleBatch(reqs=[]), None
        self.chunked_req, self._pending_chunked_abort_req = None, None
        self.result_queue: collections.deque[tuple[ScheduleBatch, Any]] = collections.deque()
        self.enable_overlap = self.enable_skip_finishing_decode = overlap
        self.enable_priority_preemption = self.enable_priority_scheduling = prioritizes
        self.schedule_low_priority_values_first = self.abort_on_priority_when_disabled = False
        self.priority_scheduling_preemption_threshold, self.max_queued_requests = 0, None
        self.max_prefill_tokens, self.max_prefill_bs, self.page_size, self.truncation_align_size = 1 << 30, 0, 1, None
        self.processed_tokens_counter = self.forward_ct = self.prefill_decode_interval = 0
        self._prefill_decode_interval_remaining, self._engine_paused = 0, False
        self.new_token_ratio_tracker = _NOTHING(current=1.0, decay_step=_ignored)
        self.disaggregation_mode, self.spec_algorithm = DisaggregationMode.NULL, SpeculativeAlgorithm.NONE
        self.enable_hierarchical_cache, self.is_hybrid_swa = self.pools.has_tiers, self.pools.window > 0
        self.enable_lmcache = self.enable_unified_cache_external_linker = False
        self.enable_hisparse = self.enable_overlap_mlx = False
        self.is_mixed_chunk = self.require_mlp_sync = False
        self.dllm_config = self.prefill_delayer = self.min_free_slots_delayer = self.dynamic_chunk_sizer = None
        self.hisparse_coordinator = self.decode_offload_manager = self.lora_drainer = self.draft_worker = None
        self._pause_started_at = self.rust_server = None
        self.enable_lora = self.enable_lora_overlap_loading = True
        self.lora_overlap_loader = _NOTHING(try_overlap_load_lora=self._adapter_fits)
        self.dllm_manager = _NOTHING(any_staging_reqs=lambda: False)
        self.grammar_manager = _NOTHING(grammar_queue=[], has_waiting_grammars=_ignored, clear=_ignored)
        self.beam_coordinator = _NOTHING(pending_member_rows=lambda _batch: 0, retire_group=_ignored)
        self.dp_attn_adapter = _NOTHING(maybe_prepare_mlp_sync_batch=_same, maybe_convert_decode_to_extend=_same)
        self.ngram_embedding_manager = _NOTHING(prepare_for_forward=_same)
        self.load_inquirer = _NOTHING(_get_num_pending_tokens=lambda **_options: 0)
        self.metrics_reporter = _NOTHING(
            enable_metrics=False,
            current_scheduler_metrics_enabled=False,
            is_stats_logging_rank=False,
            num_generated_tokens=0,
            forward_ct_decode=0,
            report_prefill_stats=_ignored,
            report_decode_stats=_ignored,
            reset_metrics=_ignored,
        )
        self.kv_events_publisher = _NOTHING(publish_kv_events=_ignored)
        runner = _NOTHING(attn_backend=None, prefill_aware_swa=False)
        self.tp_worker = _NOTHING(model_runner=runner)
        self.output_streamer = _NOTHING(stream_output=_ignored)
        self.batch_result_processor = SchedulerBatchResultProcessor(
            is_generation=True,
            disaggregation_mode=self.disaggregation_mode,
            enable_overlap=overlap,
            enable_overlap_mlx=False,
            model_config=self.model_config,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            hisparse_coordinator=None,
            req_to_token_pool=self.req_to_token_pool,
            decode_offload_manager=None,
            metrics_collector=None,
            metrics_reporter=self.metrics_reporter,
            draft_worker=None,
            model_worker=None,
            logprob_result_processor=None,
            output_streamer=self.output_streamer,
            beam_coordinator=self.beam_coordinator,
            abort_request=_ignored,
        )

    @property
    def enable_hicache_storage(self) -> bool:
        return self.pools.has_tiers and self.tree_cache.tiers.storage is not None

    # Arrival

    def abort(self, req: Req) -> None:
        """Remove a waiting request from the queue without notifying admission, as SGLang does."""
        self.waiting_queue.remove(req)

    def abort_chunked(self) -> Req:
        """Have the next step release the request in chunked prefill, as SGLang does; returns the request."""
        self._pending_chunked_abort_req = self.chunked_req
        return self.chunked_req

    def send_abort_output(self, _message: Any, req: Req) -> None:
        assert req.finished() and not req.kv.holds_kv, "SGLang: out of memory even after retracting all others"

    def unload(self, adapter: str) -> None:
        """Unload an adapter, now or as soon as nothing uses it: then it is in `unloaded`."""
        self._request_dispatcher(types.SimpleNamespace(lora_id=adapter))

    def _request_dispatcher(self, message: Any) -> Any:
        return control.unload_adapter(lambda _self, message: self.unloaded.append(message.lora_id), self, message)

    # The loop

    def step(self) -> None:
        """One turn of SGLang's event loop."""
        repairs.handle_postponed(None, self, [])
        plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        self.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch is not None:
            self.log.append([req.rid for req in batch.reqs])
            self.pools.launch(batch)
            self.result_queue.append((batch.copy(), None))
        while len(self.result_queue) > (self.enable_overlap and batch is not None):
            self.process_batch_result(self.result_queue[0][0])
            self.result_queue.popleft()
        self.last_batch = batch
        if batch is None:
            upkeep.check(self)

    def run(self, max_steps: int = 200) -> None:
        """Take steps until every request is answered."""
        for _ in range(max_steps):
            self.step()
            if self.is_fully_idle():
                return
        raise AssertionError(f"hangs with {[req.rid for req in self.waiting_queue]} waiting")

    def _process_hicache_events(self, *_args: Any) -> None:
        self.pools.take_acknowledgements()

    def _get_new_batch_prefill_raw(self, *args: Any, **kwargs: Any) -> Any:
        stock, sglang_scheduler.ScheduleBatch = sglang_scheduler.ScheduleBatch, self.batch_class
        try:
            return super()._get_new_batch_prefill_raw(*args, **kwargs)
        finally:
            sglang_scheduler.ScheduleBatch = stock

    def get_prefill_adder_class(self) -> type[PrefillAdder]:
        return self.adder_class

    def get_num_allocatable_reqs(self, running_bs: int, *_args: Any, num_held_rows: int = 0, **_more: Any) -> int:
        """As SGLang's, without beams and pipeline stages."""
        return min(self.pools.rows.available_size() + num_held_rows, self.max_running_requests - running_bs)

    def _adapter_fits(self, adapter: str | None, adapters: set[str | None]) -> bool:
        if adapter in self.loading:
            self.loading.remove(adapter)
            return False
        return len({adapter} | adapters) <= self.max_adapters

    def process_batch_result(self, batch: ScheduleBatch, _result: Any = None) -> None:
        """Every request of the batch whose prompt is complete generates a token."""
        result = GenerationBatchResult(next_token_ids=torch.tensor(self._next_tokens(batch.reqs)))
        if batch.forward_mode.is_decode():
            self.batch_result_processor.process_batch_result_decode(batch, result)
        else:
            self.batch_result_processor.process_batch_result_prefill(batch, result)
        self.tree_cache.flush_pending_backups()

    @staticmethod
    def _next_tokens(reqs: Sequence[Req]) -> list[int]:
        return [0 if is_internal(req) else req.future[len(req.output_ids)] for req in reqs]

"""Hooks on the steps of SGLang's scheduler, which call chunk admission.

Internal requests, the fills and probes, decode nothing, and end when nobody waits for them.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req, retract_all
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.attention.table import table_of
from sglang_lazy.comb.producer import new_producer
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.fills import Encoding
from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.core.state import fill_of, is_ahead, is_internal, lazy_state, linked
from sglang_lazy.port.cache.composite import CompositeCache
from sglang_lazy.port.comb.pool import new_encoder
from sglang_lazy.port.facts import SchedulerFacts, admission_of, dp_rank
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.model.model_runner import server_traits
from sglang_lazy.port.scheduler import upkeep
from sglang_lazy.scheduler.admission import ChunkAdmission
from sglang_lazy.scheduler.arrival import Arrival, Limits, refuse_chunks
from sglang_lazy.scheduler.preambles import check_default_preamble, neutral_preamble
from sglang_lazy.scheduler.producer import NewRequest

HOOKS = Hooks()
_SCHEDULER = HOOKS.on("sglang.srt.managers.scheduler.Scheduler")


@_SCHEDULER.required("__init__", "AFTER", "scheduler", "chunks are admitted to the schedule")
def attach_admission(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Attach admission to a cache that can hold chunks; garbage collection will not visit what is there by now."""
    if type(scheduler.tree_cache) is CompositeCache:  # it says itself that it is SGLang's own
        config = LazyConfig.current()
        preamble = neutral_preamble(config.preamble, scheduler.tokenizer)
        check_default_preamble(config.default_link, preamble, scheduler.model_config.context_len)
        runner = scheduler.tp_worker.model_runner
        scheduler.tree_cache.admission = new_admission(
            scheduler,
            config.max_chunks,
            server_traits(runner),
            preamble,
            config.max_pinned,
            new_encoder(runner, max_fill_tokens(scheduler)),
        )
        if (tiers := scheduler.tree_cache.tiers) is not None:
            tiers.transfers.forward_stream = scheduler.forward_stream
        scheduler.tree_cache.admission.control.dp_rank = dp_rank()
        scheduler.tree_cache.admission.warnings.speaks = scheduler.metrics_reporter.is_stats_logging_rank
        upkeep.attach_metrics(scheduler)
        upkeep.freeze()


def new_admission(
    scheduler: Any,
    max_chunks: int,
    traits: ServerTraits | None = None,
    preamble: array | None = None,
    max_pinned: float = LazyConfig.max_pinned,
    encode: Callable[[Sequence[Encoding]], None] | None = None,
) -> ChunkAdmission:
    """Admission for a scheduler whose tree cache is a `CompositeCache`.

    max_pinned: a share of the chunks' pools.
    encode: computes chunks that have their own pool.
    """
    rows, new_request, facts = scheduler.tree_cache.rows, internal_requests(scheduler), SchedulerFacts(scheduler)
    table = table_of(rows.pool)
    assert table is not None, "its cache holds chunks"
    recurrent = table.recurrent
    limits = Limits(
        pool_size=rows.device.size,
        chunk_pool_size=rows.store.device.size,
        context_len=scheduler.model_config.context_len,
        max_chunks=max_chunks,
        traits=traits or ServerTraits(),
        neutral_preamble=preamble or array("q"),
        windows=rows.device.windows,
        max_fill_tokens=max_fill_tokens(scheduler),
        num_states=math.inf if recurrent is None else recurrent.pool.size,
        max_pieces=math.inf if recurrent is None else recurrent.max_pieces,
    )
    producer = new_producer(rows.store, facts, new_request, limits.max_fill_tokens, limits.max_pieces, encode)
    arrival = Arrival(rows.store, facts, limits, new_request)
    return ChunkAdmission(facts, rows, arrival, producer, CLIP_MAX_NEW_TOKENS, max_pinned)


def max_fill_tokens(scheduler: Any) -> int:
    """The most chunk tokens computed at once, except for a longer single chunk."""
    return scheduler.chunked_prefill_size or scheduler.max_prefill_tokens


def internal_requests(scheduler: Any) -> NewRequest:
    """A function that makes the requests of fills and probes."""
    params = SamplingParams(max_new_tokens=0, temperature=0)
    params.normalize(None)

    def new_request(rid: str, tokens: array, parent: Req) -> Req:
        req = Req(
            rid,
            "",
            tokens,
            params,
            vocab_size=scheduler.model_config.vocab_size,
            eos_token_ids=scheduler.model_config.hf_eos_token_id,
            extra_key=parent.extra_key,
            cache_salt=parent.cache_salt,
            priority=parent.priority,
        )
        req.lora_id = parent.lora_id  # not through the constructor: `extra_key` includes it already
        req.time_stats.wait_queue_entry_time = parent.time_stats.wait_queue_entry_time
        req.tokenizer = scheduler.tokenizer
        req.logprob_start_len = len(tokens)
        req.finished_output = True  # its output is never streamed
        return req

    return new_request


@_SCHEDULER.required(
    "_add_request_to_queue", "AROUND", "scheduler", "requests get the state of their chunks as they arrive"
)
def add_request_to_queue(original: Callable, scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    """Around `Scheduler._add_request_to_queue`, through which all requests, even retracted ones, enter the queue."""
    admission = admission_of(scheduler)
    if admission is None:
        refuse_chunks(SchedulerFacts(scheduler), req)
        original(scheduler, req, *args, **kwargs)
    elif fill_of(req) is not None:  # retracted: the next admission of its parents starts it again
        admission.producer.forget(req)
    elif not is_internal(req):  # a retracted probe is dropped: its parent has a new one by now
        admission.put_back()  # SGLang counts the queue, and may drop somebody else from it
        original(scheduler, req, *args, **kwargs)
        if not scheduler.waiting_queue or scheduler.waiting_queue[-1] is not req:
            return  # refused
        admission.arrival.receive(req)  # now that it has a priority, which its probe inherits


@_SCHEDULER.feature("_prefetch_kvcache", "AROUND", "storage is read chunk by chunk")
def prefetch_kvcache(original: Callable, scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    """Skip it, since storage has only chunks, which are fetched on arrival."""
    if admission_of(scheduler) is None:
        original(scheduler, req, *args, **kwargs)


@_SCHEDULER.required(
    "_get_new_batch_prefill_raw", "AROUND", "scheduler", "batches take only prompts whose chunks are there"
)
def get_new_batch_prefill_raw(
    original: Callable, scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any
) -> tuple[Any, Any]:
    """Around `Scheduler._get_new_batch_prefill_raw`, which sees only requests that can run, see `calc_priority`: put
    the others back into the queue, in order."""
    admission = admission_of(scheduler)
    if admission is None:
        return original(scheduler, prefill_delayer_single_pass, running_batch)
    if running_batch.is_empty() or admission.gave_back:
        running_batch.batch_is_full = False  # nothing else would clear it before another request ends
    admission.gave_back = False
    admission.left_out_adapters.clear()
    batch, running_batch = original(scheduler, prefill_delayer_single_pass, running_batch)
    if batch is not None and prefill_delayer_single_pass is not None:
        _count_users_only(prefill_delayer_single_pass, sum(map(is_internal, batch.reqs)))
    admission.formed(starving=batch is None and running_batch.is_empty() and scheduler.chunked_req is None)
    return batch, running_batch


def _count_users_only(attempt: Any, num_internal: int) -> None:
    """Leave internal requests out of the batch size that SGLang's `PrefillDelayerSinglePassExecutor` will be told:
    later prefills may wait until that many users' requests wait."""
    finalize = attempt.finalize
    attempt.finalize = lambda *, actual_prefill_bs: finalize(actual_prefill_bs=actual_prefill_bs - num_internal)


@HOOKS.on("sglang.srt.managers.schedule_batch.ScheduleBatch").required(
    "prepare_for_extend", "AFTER", "scheduler", "chunks and segments are entered when rows are assigned"
)
def prepare_for_extend(_result: Any, batch: Any) -> None:
    """After `ScheduleBatch.prepare_for_extend`, which assigns rows: publish chunks, and enter each row's segments. From
    here on SGLang counts the waiting requests."""
    table = table_of(batch.req_to_token_pool)
    if table is None:
        return
    batch.tree_cache.admission.put_back()
    reqs = {req.kv.req_pool_idx: req for req in batch.reqs}
    if table.linked_rows.isdisjoint(reqs) and all(lazy_state(req) is None for req in batch.reqs):
        return  # prompts without chunks, in rows that had none
    batch.tree_cache.admission.launch(batch)
    states = {row: linked(req) for row, req in reqs.items()}
    chunks = {row: () if state is None else state.read_in_place for row, state in states.items()}
    nodes = {row: req.last_node.chunks.nodes for row, req in reqs.items() if chunks[row]}
    ids = {row: [*map(batch.tree_cache.store.segment_id, chunks[row], ends)] for row, ends in nodes.items()}
    orders = {row: state.row.positions for row, state in states.items() if state is not None and not state.recomputes}
    table.assign(chunks, ids, orders)


@_SCHEDULER.required("get_next_batch_to_run", "AROUND", "scheduler", "fills and probes end after their prefill")
def get_next_batch_to_run(original: Callable, scheduler: Any, running_batch: Any, last_batch: Any) -> Any:
    """Remove internal requests from the last batch before it is merged into the running one, and abort the one in
    chunked prefill if nobody waits for it any more. No other can be aborted: its last piece is under way."""
    was_prefill = last_batch is not None and last_batch.forward_mode.is_extend()
    if was_prefill and (internal := [req for req in last_batch.reqs if is_internal(req)]):
        last_batch.filter_batch(reqs_to_exclude=internal)
        running_batch.batch_is_full = False
    if (admission := admission_of(scheduler)) is not None:
        if admission.is_abandoned(scheduler.chunked_req):
            scheduler._pending_chunked_abort_req = scheduler.chunked_req
            scheduler.process_pending_chunked_abort()
        admission.make_room_to_go_on(running_batch.reqs)
    return original(scheduler, running_batch, last_batch)


@_SCHEDULER.feature("send_abort_output", "AROUND", "no client hears of the end of an internal request")
def send_abort_output(send: Callable, scheduler: Any, message: Any, req: Any) -> None:
    """No client is to be told of an internal request."""
    if not is_internal(req):
        send(scheduler, message, req)


@_SCHEDULER.required(
    "update_running_batch", "AROUND", "scheduler", "pins end before a running request is aborted for memory"
)
def update_running_batch(update: Callable, scheduler: Any, batch: Any) -> Any:
    """Around `Scheduler.update_running_batch`, which aborts the last request that it could not retract, if there is no
    slot for its next token: pins end first, and a prompt in chunked prefill, which is not in the batch, starts anew."""
    admission = admission_of(scheduler)
    if admission is not None and admission.may_lack_slots(len(batch.reqs)):
        left = [i for i, req in enumerate(batch.reqs) if not req.finished()]
        while len(left) == 1 and not batch.check_decode_mem(left):
            if not admission.give_up_pins() and not _retract_chunked(scheduler):
                break
    return update(scheduler, batch)


def _retract_chunked(scheduler: Any) -> bool:
    """Put the request in chunked prefill back into the queue; returns False if there is none."""
    req, scheduler.chunked_req = scheduler.chunked_req, None
    if req is None:
        return False
    retract_all(
        reqs=[req],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
    )
    scheduler._add_request_to_queue(req, is_retracted=True)
    return True


@_SCHEDULER.required(
    "_abort_on_queued_limit", "AROUND", "scheduler", "chunks computed ahead of use take no places in the queue"
)
def abort_on_queued_limit(refuse: Callable, scheduler: Any, req: Any) -> bool:
    """A request that was retracted had its place in the queue before, and those that compute chunks ahead of use take
    none."""
    if scheduler.max_queued_requests is None or req.retracted_stain:
        return False
    queue = scheduler.waiting_queue
    scheduler.waiting_queue = [other for other in queue if not is_ahead(other)]
    refused = refuse(scheduler, req)
    left = set(scheduler.waiting_queue)  # SGLang may drop somebody else
    scheduler.waiting_queue = [other for other in queue if is_ahead(other) or other in left]
    return refused

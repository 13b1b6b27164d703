"""Hooks on the steps of SGLang's scheduler, which call chunk admission."""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.attention.table import table_of
from sglang_lazy.comb.producer import EncoderProducer
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.fills import Encoding
from sglang_lazy.core.model import MAX_PREAMBLE_LEN
from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.core.segments import LAYOUT_PARAM
from sglang_lazy.core.state import LinkedRequest, fill_of, is_ahead, is_internal, lazy_state, linked, unused_hits
from sglang_lazy.policies import get_policy, policy_elsewhere
from sglang_lazy.port.cache.composite import CompositeCache
from sglang_lazy.port.comb.pool import new_encoder
from sglang_lazy.port.facts import SchedulerFacts, dp_rank
from sglang_lazy.port.hooks import feature, required
from sglang_lazy.port.model.model_runner import server_traits
from sglang_lazy.port.repairs.operators import pause_empties_queue
from sglang_lazy.port.scheduler import chunk_metrics
from sglang_lazy.scheduler.admission import ChunkAdmission
from sglang_lazy.scheduler.arrival import Arrival, Limits, requested_layout
from sglang_lazy.scheduler.producer import FillProducer, NewRequest, Producer


def admission_of(scheduler: Any) -> ChunkAdmission | None:
    """The scheduler's admission, or None if it serves without chunk reuse."""
    return getattr(scheduler.tree_cache, "admission", None)


def attach_admission(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `Scheduler.__init__`: attach admission to a cache that can hold chunks."""
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
        chunk_metrics.attach(scheduler)


def new_admission(
    scheduler: Any,
    max_chunks: int,
    traits: ServerTraits | None = None,
    preamble: array | None = None,
    max_pinned: float = LazyConfig.max_pinned,
    encode: Callable[[Sequence[Encoding]], None] | None = None,
) -> ChunkAdmission:
    """Admission for a scheduler whose tree cache is a `CompositeCache`.

    max_pinned: a share of the chunks' pool.
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
    producer: Producer
    if encode is None:
        producer = FillProducer(rows.store.pending, facts, new_request, limits.max_fill_tokens, limits.max_pieces)
    else:
        device, most = rows.store.device, limits.max_fill_tokens
        producer = EncoderProducer(rows.store.pending, facts, most, device.allocate, device.free, encode)
    arrival = Arrival(rows.store, facts, limits, new_request)
    budget = int(max_pinned * rows.store.device.size)
    return ChunkAdmission(facts, rows, arrival, producer, CLIP_MAX_NEW_TOKENS, budget)


def max_fill_tokens(scheduler: Any) -> int:
    """The most chunk tokens computed at once, except for a longer single chunk."""
    return scheduler.chunked_prefill_size or scheduler.max_prefill_tokens


def neutral_preamble(text: str, tokenizer: Any) -> array:
    """The tokens of `--lazy-preamble` at the beginning of a prompt, int64; none if the server has no tokenizer.

    Raises ValueError if there are too many.
    """
    tokens = array("q", tokenizer.encode(text) if tokenizer is not None and text else ())
    if len(tokens) > MAX_PREAMBLE_LEN:
        raise ValueError(f"--lazy-preamble has {len(tokens)} tokens, at most {MAX_PREAMBLE_LEN} are allowed")
    return tokens


def check_default_preamble(link: str, preamble: array, context_len: int) -> None:
    """Raise ValueError if no prompt could be served under the default policy `link` after this preamble."""
    if get_policy(link).preamble == "neutral" and not 0 < len(preamble) < context_len:
        raise ValueError(
            f"--lazy-default-link {link}: --lazy-preamble has {len(preamble)} tokens, and a chunk after it would have "
            f"to fit into {context_len} positions"
        )


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


def add_request_to_queue(original: Callable, scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    """Around `Scheduler._add_request_to_queue`, through which all requests, even retracted ones, enter the queue."""
    admission = admission_of(scheduler)
    if admission is None:
        _refuse_chunks(scheduler, req)
        original(scheduler, req, *args, **kwargs)
    elif fill_of(req) is not None:  # retracted: the next admission of its parents starts it again
        admission.producer.forget(req)
    elif not is_internal(req):  # a retracted probe is dropped: its parent has a new one by now
        admission.put_back()  # SGLang counts the queue, and may drop somebody else from it
        original(scheduler, req, *args, **kwargs)
        if not scheduler.waiting_queue or scheduler.waiting_queue[-1] is not req:
            return  # refused
        admission.arrival.receive(req)  # now that it has a priority, which its probe inherits
        if lazy_state(req) is not None:
            admission.linked_waiting = True
            admission.ahead.waiting |= is_ahead(req)
            _drop_layout(req)


def _drop_layout(req: Req) -> None:
    """Remove the layout from the request's parameters: `req.lazy` has it now. SGLang has put the request itself there,
    a cycle that would leave all it holds to the garbage collector."""
    params = req.sampling_params
    if isinstance(params.custom_params, dict) and params.custom_params.keys() <= {LAYOUT_PARAM, "__req__"}:
        params.custom_params = None


def _refuse_chunks(scheduler: Any, req: Req) -> None:
    """Without chunk reuse, refuse prompts with chunks unless their policy reuses none."""
    if req.to_finish is not None:
        return
    try:
        layout = requested_layout(SchedulerFacts(scheduler), req)
        if layout is not None and policy_elsewhere(layout.link).reuses:
            raise ValueError("this server runs without chunk reuse: it takes chunks only with link full")
    except ValueError as error:
        req.set_finish_with_abort(str(error))


def prefetch_kvcache(original: Callable, scheduler: Any, req: Req, *args: Any, **kwargs: Any) -> None:
    """Around `Scheduler._prefetch_kvcache`: skip it, since storage has only chunks, which are fetched on arrival."""
    if admission_of(scheduler) is None:
        original(scheduler, req, *args, **kwargs)


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
    shown = admission.shown or scheduler.waiting_queue
    admission.put_back()
    admission.reconcile()
    if batch is None and running_batch.is_empty() and scheduler.chunked_req is None:
        # With one pool for text and chunks, the head of the queue is admitted by now; with two, or where chunks have
        # states as well, chunks may lack room, which pins hold.
        has_own_pool = not admission.rows.shares_pool or admission.store.states is not None
        lacks_room = scheduler.waiting_queue and has_own_pool
        if shown or admission.holders or lacks_room:
            admission.make_room()
    return batch, running_batch


def _count_users_only(attempt: Any, num_internal: int) -> None:
    """Leave internal requests out of the batch size that SGLang's `PrefillDelayerSinglePassExecutor` will be told:
    later prefills may wait until that many users' requests wait."""
    finalize = attempt.finalize
    attempt.finalize = lambda *, actual_prefill_bs: finalize(actual_prefill_bs=actual_prefill_bs - num_internal)


def prepare_for_extend(_result: Any, batch: Any) -> None:
    """After `ScheduleBatch.prepare_for_extend`, which assigns rows: publish chunks, and enter each row's segments. From
    here on SGLang counts the waiting requests."""
    table = table_of(batch.req_to_token_pool)
    if table is None:
        return
    batch.tree_cache.admission.put_back()
    rows = [req.kv.req_pool_idx for req in batch.reqs]
    if table.linked_rows.isdisjoint(rows) and all(lazy_state(req) is None for req in batch.reqs):
        return  # prompts without chunks, in rows that had none
    batch.tree_cache.admission.launch(batch)
    states = {req.kv.req_pool_idx: linked(req) for req in batch.reqs}
    chunks = {row: () if state is None else state.read_in_place for row, state in states.items()}
    nodes = {req.kv.req_pool_idx: req.last_node.chunks.nodes for req in batch.reqs if chunks[req.kv.req_pool_idx]}
    ids = {row: [*map(batch.tree_cache.store.segment_id, chunks[row], ends)] for row, ends in nodes.items()}
    orders = {row: state.row.positions for row, state in states.items() if state is not None and not state.recomputes}
    table.assign(chunks, ids, orders)


def is_fully_idle(
    original: Callable, scheduler: Any, for_health_check: bool = False, *args: Any, **kwargs: Any
) -> bool:
    """Around `Scheduler.is_fully_idle`: not while the tree of chunks copies, since SGLang asks only the tree of text;
    and a paused scheduler is idle if nothing has a row."""
    if for_health_check:
        return original(scheduler, for_health_check, *args, **kwargs)
    with pause_empties_queue(scheduler):
        idle = original(scheduler, for_health_check, *args, **kwargs)
    return idle and (admission_of(scheduler) is None or not scheduler.tree_cache.is_copying)


def flush_cache(original: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    """Around `Scheduler.flush_cache`: aborted requests, and those that wait in a paused scheduler, first release their
    chunks."""
    with pause_empties_queue(scheduler):
        admission = admission_of(scheduler)
        if admission is not None and scheduler.is_fully_idle():
            admission.reconcile()
        return original(scheduler, *args, **kwargs)


def report_reuse(accumulator: Any, *, get_cached_tokens_details: Any, **kwargs: Any) -> tuple[tuple, dict]:
    """Before `_GenerationStreamAccumulator.__init__`, once a step: add chunks to the details that it asks for.

    A hook on the method that it asks would cost plain traffic most of all: it is called for every token.
    """

    def details(req: Req) -> dict | None:
        state = linked(req)
        if state is None and not unused_hits(req):
            return get_cached_tokens_details(req)
        if state is None:
            return {
                **(get_cached_tokens_details(req) or {"device": 0, "host": 0}),
                "chunk": 0,
                **hits_by_chunk(req, None),
            }
        reported = cached_tokens_details(req, state)
        if "storage" in reported:  # as SGLang reports it
            reported["storage_backend"] = get_cached_tokens_details.__self__.tree_cache.tiers.storage.name
        return reported

    return (accumulator,), {**kwargs, "get_cached_tokens_details": details}


def cached_tokens_details(req: Req, state: LinkedRequest) -> dict[str, Any]:
    """A linked request's reused tokens by source, as results report them."""
    host, storage = state.num_loaded_tokens(fetched=False), state.num_loaded_tokens(fetched=True)
    return {
        "device": req.cached_tokens - host - storage,
        "host": host,
        **({"storage": storage} if storage else {}),
        "chunk": state.num_reused_tokens,
        **hits_by_chunk(req, state),
        **({"prompt": len(state.prompt.chunks[0].prompt_ids)} if state.prompt.cross else {}),
    }


def hits_by_chunk(req: Any, state: LinkedRequest | None) -> dict[str, str]:
    """Which chunks of a prompt were cached, a bit mask; once it has been answered, also those that it reuses in part.

    Strings: with many chunks the mask exceeds the integers of a message.
    """
    mask, unused = state.hit_mask if state is not None else 0, unused_hits(req)
    hits = {"chunk_hits": f"{mask | unused:x}"}
    if req.finished():
        none = [(i, 0) for i in range(unused.bit_length()) if unused >> i & 1]
        hits["chunk_parts"] = ",".join(f"{i}:{n}" for i, n in (state.partly_reused if state is not None else []) + none)
    return hits


def get_internal_state(result: Any, scheduler: Any, *_args: Any) -> Any:
    """After `Scheduler.get_internal_state`: add the counts of the host tier and storage."""
    if admission_of(scheduler) is not None and (tiers := scheduler.tree_cache.tiers) is not None:
        result.internal_state |= tiers.numbers()
    return result


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    feature(
        f"{_SCHEDULER}.get_internal_state",
        get_internal_state,
        "AFTER",
        "/server_info reports the host tier and storage",
    ),
    required(f"{_SCHEDULER}.__init__", attach_admission, "AFTER", "scheduler", "chunks are admitted to the schedule"),
    required(
        f"{_SCHEDULER}._add_request_to_queue",
        add_request_to_queue,
        "AROUND",
        "scheduler",
        "requests get the state of their chunks as they arrive",
    ),
    feature(f"{_SCHEDULER}._prefetch_kvcache", prefetch_kvcache, "AROUND", "storage is read chunk by chunk"),
    required(
        f"{_SCHEDULER}._get_new_batch_prefill_raw",
        get_new_batch_prefill_raw,
        "AROUND",
        "scheduler",
        "batches take only prompts whose chunks are there",
    ),
    required(
        f"{_SCHEDULER}.is_fully_idle",
        is_fully_idle,
        "AROUND",
        "scheduler",
        "a scheduler that copies chunks is not idle",
    ),
    feature(f"{_SCHEDULER}.flush_cache", flush_cache, "AROUND", "aborted requests release their chunks before a flush"),
    required(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        prepare_for_extend,
        "AFTER",
        "scheduler",
        "chunks and segments are entered when rows are assigned",
    ),
    required(
        "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.__init__",
        report_reuse,
        "BEFORE",
        "scheduler",
        "answers report reused chunks",
    ),
)

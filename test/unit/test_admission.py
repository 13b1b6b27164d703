"""Admission of linked requests, beside a scheduler that is SGLang's in what admission sees of it, and runs no model."""

import dataclasses
import random
import types

import pytest
import torch
from sglang.srt.managers import schedule_batch, schedule_policy
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from test_cache_machine import CHUNK, TEXT, VOCAB_SIZE, Pools, contents_of_chunks, new_request

from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.prompt import CHUNK_NAMESPACE
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.port import scheduler as hooks
from sglang_lazy.scheduler.admission import ChunkAdmission, is_fill, is_launched, is_linked

A, B, C, D = ((CHUNK, (i, i + 1, i + 2, i + 3)) for i in (1, 5, 9, 12))
QUESTION = (TEXT, (15,))


@pytest.fixture(autouse=True)
def no_context_parallelism(monkeypatch):
    """SGLang's prefill budget asks its global configuration for these, which only a server publishes."""
    monkeypatch.setattr(schedule_policy, "is_dsa_prefill_cp_in_seq_split", lambda: False)
    monkeypatch.setattr(schedule_policy, "is_prefill_context_parallel_enabled", lambda: False)


class Batch:
    """What hooks and admission see of a `ScheduleBatch`."""

    def __init__(self, reqs=(), forward_mode=ForwardMode.EXTEND, scheduler=None):
        self.reqs = list(reqs)
        self.forward_mode = forward_mode
        if scheduler is not None:
            self.chunked_req = scheduler.chunked_req
            self.tree_cache, self.req_to_token_pool = scheduler.tree_cache, scheduler.pools.rows
            self.extend_lens = [req.extend_range.length for req in self.reqs]
            rows = self.req_to_token_pool.req_to_token
            computed = [rows[req.req_pool_idx, slice(*req.extend_range)] for req in self.reqs]
            self.out_cache_loc = torch.cat(computed).to(torch.int64)
        self.batch_is_full = False

    def is_empty(self):
        return not self.reqs

    def batch_size(self):
        return len(self.reqs)

    def filter_batch(self, chunked_req_to_exclude=()):
        self.reqs = [req for req in self.reqs if not req.finished() and req not in chunked_req_to_exclude]


class Scheduler:
    """SGLang's scheduling loop around the real cache, prefill budget, admission and hooks.

    overlap: take the result of a batch only after the next one was launched.
    log: what each step launched, as ids.
    """

    def __init__(self, pool_size=100, chunked_prefill_size=64, overlap=False, max_chunks=8, materialize=False):
        self.pools = Pools(pool_size, materialize=materialize)
        self.pools.rows.segment_table = SegmentTable(len(self.pools.rows.req_to_token), max_chunks, "cpu")
        self.tree_cache = self.pools.cache
        self.chunked_prefill_size, self.overlap, self.results = chunked_prefill_size, overlap, []
        self.tree_cache.admission = self.admission = ChunkAdmission(self, self.tree_cache, max_chunks, materialize)
        self.waiting_queue, self.running_batch, self.last_batch = [], Batch(), None
        self.chunked_req, self.chunked_abort = None, None
        self.tokenizer = None
        self.model_config = types.SimpleNamespace(vocab_size=VOCAB_SIZE, hf_eos_token_id=set())
        self.new_token_ratio_tracker = types.SimpleNamespace(current=1.0)
        self.log = []

    # Arrival

    def submit(self, parts, rid, **kwargs):
        req = new_request(parts, rid=rid, **kwargs)
        self._add_request_to_queue(req)
        return req

    def _add_request_to_queue(self, req):
        hooks.add_request_to_queue(lambda scheduler, req: scheduler.waiting_queue.append(req), self, req)
        if is_linked(req):
            self.pools.name_paths(req)

    def abort(self, req):
        """SGLang takes a waiting request out of the queue and tells nobody."""
        self.waiting_queue.remove(req)

    def abort_chunked(self):
        """SGLang releases a request between two pieces of its prefill, in its next step; returns the request."""
        self.chunked_abort = self.chunked_req
        return self.chunked_req

    # One step of the loop

    def step(self):
        self.running_batch, batch = hooks.get_next_batch_to_run(
            Scheduler.get_next_batch_to_run, self, self.running_batch, self.last_batch
        )
        if batch is not None:
            self.log.append([req.rid for req in batch.reqs])
            self.results.append((batch, list(batch.reqs)))
        while len(self.results) > (self.overlap and batch is not None):
            self.process_result(*self.results.pop(0))
        self.last_batch = batch
        if batch is None:
            hooks.on_idle(None, self)
        self.pools.check(self.admission.holders)

    def run(self, max_steps=200):
        """Until everything is answered."""
        for _ in range(max_steps):
            self.step()
            if self.is_fully_idle():
                return
        raise AssertionError(f"hangs with {[req.rid for req in self.waiting_queue]} waiting")

    def is_fully_idle(self):
        last_done = self.last_batch is None or self.last_batch.is_empty()
        return last_done and self.running_batch.is_empty() and not (self.chunked_req or self.waiting_queue)

    def get_next_batch_to_run(self, running_batch, last_batch):
        if self.chunked_abort is not None and self.chunked_abort is self.chunked_req:
            self.chunked_req.finished_reason = FINISH_ABORT()
            self.release(self.chunked_req, is_insert=False)
            self.chunked_req = None
        self.chunked_abort = None
        if self.chunked_req is not None and self.chunked_req.extend_range.end > len(self.chunked_req.prefix_indices):
            self.tree_cache.cache_unfinished_req(self.chunked_req, chunked=True)
        if last_batch is not None and last_batch.forward_mode.is_extend():
            size = last_batch.batch_size()
            last_batch.filter_batch([self.chunked_req])
            if last_batch.batch_size() < size:
                running_batch.batch_is_full = False
            running_batch.reqs += last_batch.reqs
        batch, running_batch = hooks.get_new_batch_prefill_raw(
            Scheduler.get_new_batch_prefill_raw, self, None, running_batch
        )
        if batch is None and not running_batch.is_empty():
            batch = self.decode_batch(running_batch)
        return running_batch, batch

    def get_new_batch_prefill_raw(self, _prefill_delayer, running_batch):
        if (running_batch.batch_is_full or not self.waiting_queue) and self.chunked_req is None:
            return None, running_batch
        cache, slots = self.tree_cache, self.pools.slots
        adder = PrefillAdder(1, cache, slots, running_batch, 1.0, 1 << 20, self.chunked_prefill_size)
        if self.chunked_req is not None:
            self.chunked_req.init_next_round_input()
            self.chunked_req = adder.add_chunked_req(self.chunked_req)
        for req in self.waiting_queue:
            if len(adder.can_run_list) + running_batch.batch_size() >= self.pools.rows.size:
                running_batch.batch_is_full = True
                break
            req.init_next_round_input(cache)
            result = adder.add_one_req(req, self.chunked_req is not None, None)
            if result != AddReqResult.CONTINUE:
                running_batch.batch_is_full = result == AddReqResult.NO_TOKEN
                break
        if not adder.can_run_list:
            return None, running_batch
        self.waiting_queue = [req for req in self.waiting_queue if req not in adder.can_run_list]
        self.chunked_req = adder.new_chunked_req or self.chunked_req
        if self.chunked_req is not None:
            self.chunked_req.inflight_middle_chunks += 1
        for req in adder.can_run_list:
            self.launch_extend(req)
        batch = Batch(adder.can_run_list, scheduler=self)
        hooks.prepare_for_extend(None, batch)
        return batch, running_batch

    def launch_extend(self, req):
        if is_fill(req):
            req.contents, req.future = contents_of_chunks(req.fill.chunks), [0]
        if not req.retracted_stain:
            req.cached_tokens += len(req.prefix_indices) - req.already_computed
            req.already_computed = req.extend_range.end
        req.is_retracted = False
        assert self.pools.extend(req, req.extend_range.length), "SGLang: prefill out of memory"
        if req not in self.pools.running:
            self.pools.running.append(req)

    def decode_batch(self, running_batch):
        running_batch.filter_batch()
        while running_batch.reqs:
            need = running_batch.batch_size()
            evict_from_tree_cache(self.tree_cache, need)
            if self.pools.slots.available_size() >= need:
                break
            assert need > 1, "SGLang: out of memory even after retracting all others"
            req = running_batch.reqs.pop()
            self.release(req, is_insert=False)
            req.reset_for_retract()
            self._add_request_to_queue(req)
        for req in running_batch.reqs:
            end = req.kv_committed_len
            self.pools.rows.req_to_token[req.req_pool_idx, end] = self.pools.slots.alloc(1)[0]
            self.pools.compute(req, end, end + 1)
        return Batch(running_batch.reqs, ForwardMode.DECODE) if running_batch.reqs else None

    def process_result(self, batch, reqs):
        for req in reqs:
            if req.inflight_middle_chunks > 0:
                req.inflight_middle_chunks -= 1
            elif not req.finished() and not req.is_retracted:
                self.pools.generate(req)
                req.update_finish_state()
                if req.finished():
                    self.release(req)
                elif batch.forward_mode.is_extend():
                    self.tree_cache.cache_unfinished_req(req)

    def release(self, req, is_insert=True):
        self.pools.release(req, is_insert)

    # What tests look at

    def visible(self):
        """The queue that batch formation would see now."""
        return self.admission.visible_queue(self.running_batch)

    def warm(self, *chunks):
        """Make chunks resident and nothing else."""
        for i, chunk in enumerate(chunks):
            self.submit([chunk, QUESTION], f"warm-{i}", max_new_tokens=1)
            self.run()
        self.log.clear()

    def counts(self, req):
        """What results say of `req`: cached tokens, those of them in chunks, and the hit mask."""
        details = hooks.cached_tokens_details(req)
        assert details["device"] == req.cached_tokens
        return req.cached_tokens, details["chunk"], int(details["chunk_hits"], 16)

    def resident(self, req):
        return [self.tree_cache.find_chunk(chunk) is not None for chunk in req.link.prompt.chunks]


both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def fill_tokens(reqs):
    """Of each fill, the chunks that it computes."""
    return [[tuple(chunk.tokens) for chunk in req.fill.chunks] for req in reqs if is_fill(req)]


@both_loops
@pytest.mark.parametrize("materialize", [False, True], ids=["in place", "copies"])
def test_fills_come_once_and_before_their_parents(overlap, materialize):
    """Missing chunks of all parents are computed in one batch, each once; parents are in it unless they get copies."""
    scheduler = Scheduler(overlap=overlap, materialize=materialize)
    parents = [
        scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1),
        scheduler.submit([B, (TEXT, (14,)), C, B, QUESTION], "p1", max_new_tokens=1),
    ]
    assert fill_tokens(scheduler.visible()) == [[A[1], B[1]], [C[1]]]
    scheduler.step()
    if materialize:
        assert scheduler.log == [["\0fill-0", "\0fill-1"]]
        assert scheduler.waiting_queue == parents, "parents wait where SGLang's abort and timeouts look for them"
        assert all(parent.link.ready for parent in parents), "what has been computed is locked for them from then on"
        scheduler.run()
        assert scheduler.log[1] == ["p0", "p1"]
    else:
        assert scheduler.log == [["\0fill-0", "p0", "\0fill-1", "p1"]]
        scheduler.run()


@both_loops
def test_parent_joins_the_last_of_its_fills(overlap):
    """Where the fills take several batches, the parent is in that which ends them, and not before."""
    scheduler = Scheduler(overlap=overlap, chunked_prefill_size=7)
    parent = scheduler.submit([A, (TEXT, (14,)), B, A, QUESTION], "p0", max_new_tokens=2)
    scheduler.step()
    assert scheduler.log == [["\0fill-0", "\0fill-1"]] and scheduler.chunked_req.rid == "\0fill-1"
    scheduler.step()
    assert scheduler.log[1:] == [["\0fill-1", "p0"]]
    scheduler.run()
    assert len(parent.output_ids) == 2


def test_a_fill_computes_as_much_as_a_batch():
    """Missing chunks share a fill up to that size; a larger one has a fill of its own; what is known is left out."""
    scheduler = Scheduler(chunked_prefill_size=9)
    scheduler.warm(D)
    long = (CHUNK, tuple(range(1, 11)))
    parent = scheduler.submit([A, B, D, A, C, long, (CHUNK, (9,)), QUESTION], "p0", max_new_tokens=1)
    shares = [[A[1], B[1]], [C[1]], [long[1]], [(9,)]]
    assert fill_tokens(scheduler.visible()) == shares
    scheduler.run()
    assert scheduler.counts(parent) == (4, 4, 0b100)
    assert all(scheduler.resident(parent))


@both_loops
def test_a_fill_in_pieces_gives_its_chunks_when_it_ends(overlap):
    """Until then nobody finds any of them; what begins like a cached chunk is computed from there on."""
    scheduler = Scheduler(chunked_prefill_size=3, overlap=overlap)
    scheduler.warm((CHUNK, (5, 6, 1)))
    scheduler.admission.max_fill_tokens = 64
    parent = scheduler.submit([A, B, C, QUESTION], "p0", max_new_tokens=1)
    for _ in range(3):
        scheduler.step()
        assert scheduler.resident(parent) == [False] * 3
    scheduler.step()
    assert scheduler.resident(parent) == [True] * 3
    assert [batch[0] for batch in scheduler.log] == ["\0fill-1"] * 4, "10 tokens, 2 of B being known"
    scheduler.run()


@both_loops
def test_a_chunk_may_be_there_when_its_fill_begins(overlap):
    """As the beginning of another, which was computed first: its last token is computed all the same."""
    scheduler = Scheduler(chunked_prefill_size=4, overlap=overlap)
    scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    late = scheduler.submit([(CHUNK, A[1][:3]), QUESTION], "p1", max_new_tokens=1)
    scheduler.step()
    fill = next(req for req in scheduler.visible() if is_fill(req))
    assert fill_tokens([fill]) == [[A[1][:3]]] and all(scheduler.resident(late))
    scheduler.run()
    assert fill.extend_range.length == 1
    assert scheduler.counts(late) == (0, 0, 0)


def test_rows_of_ended_fills_are_free_again():
    """Fills that took all rows leave them to their parent, though nothing else ended."""
    scheduler = Scheduler()
    scheduler.admission.max_fill_tokens = 2
    other = scheduler.submit([QUESTION], "other", max_new_tokens=30)
    scheduler.step()
    parent = scheduler.submit([*((CHUNK, (i, i)) for i in range(8)), QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    assert len(scheduler.log[-1]) == 7 and scheduler.running_batch.batch_is_full
    scheduler.step()
    assert scheduler.log[-1] == ["\0fill-7", "p0"]
    scheduler.run()
    assert len(parent.output_ids) == 1 and len(other.output_ids) == 30


def test_row_is_completed_though_the_locks_were_taken_back():
    """A parent that its batch takes may lose what it holds as a waiting one, when SGLang makes room for that batch."""
    scheduler = Scheduler(pool_size=16)
    scheduler.warm(A)
    parent = scheduler.submit([A, B, (TEXT, (14, 13, 12)), QUESTION], "p0", max_new_tokens=1)
    fill, _ = scheduler.visible()
    extend = scheduler.launch_extend

    def launch_extend(req):
        extend(req)
        if req is fill:
            assert scheduler.tree_cache.release_waiting_lock()

    scheduler.launch_extend = launch_extend
    scheduler.step()
    assert scheduler.log == [[fill.rid, "p0"]]
    scheduler.run()
    assert scheduler.counts(parent) == (4, 4, 0b01)


def test_visible_queue_keeps_the_order():
    """Batch formation sees fills right before their parents; the real queue keeps every request in its place."""
    scheduler = Scheduler()
    scheduler.warm(D)
    reqs = [
        scheduler.submit([QUESTION], "plain"),
        scheduler.submit([B, A, QUESTION], "cold"),
        scheduler.submit([QUESTION, D, QUESTION], "warm"),
        scheduler.submit([A, C, QUESTION], "shares"),
        scheduler.submit([(TEXT, (3, 4))], "last"),
    ]
    visible = scheduler.visible()
    assert [fill_tokens([req])[0] if is_fill(req) else req.rid for req in visible] == [
        "plain",
        [B[1], A[1]],
        "cold",
        "warm",
        [C[1]],
        "shares",
        "last",
    ]
    assert scheduler.waiting_queue == reqs
    assert scheduler.visible() == visible, "looking twice changes nothing"
    assert not any(is_launched(fill) for fill in visible if is_fill(fill))


def test_queue_is_put_back_in_order():
    """What batch formation did not take keeps its place, with parents and newcomers, and no fill among them."""
    scheduler = Scheduler()
    first = scheduler.submit([A, QUESTION], "parent")
    plain = [scheduler.submit([(TEXT, (i,))], f"plain-{i}") for i in range(3)]
    newcomer = new_request([QUESTION], rid="newcomer")

    def formation(scheduler, _delayer, running_batch):
        assert [is_fill(req) for req in scheduler.waiting_queue] == [True, False, False, False, False]
        scheduler.waiting_queue = [*scheduler.waiting_queue[:3], scheduler.waiting_queue[4]]
        scheduler.waiting_queue.append(newcomer)
        return Batch([plain[1]]), running_batch

    hooks.get_new_batch_prefill_raw(formation, scheduler, None, scheduler.running_batch)
    assert scheduler.waiting_queue == [first, plain[0], plain[2], newcomer]


@pytest.mark.parametrize("others", [0, 1], ids=["into a plain queue", "beside another parent"])
def test_parent_that_arrives_during_batch_formation_waits(others):
    """SGLang queues requests whose grammar is ready while it forms a batch: a parent among them waits."""
    scheduler = Scheduler()
    plain = scheduler.submit([QUESTION], "plain")
    waiting = [scheduler.submit([B, QUESTION], "other") for _ in range(others)]
    late = new_request([A, QUESTION], rid="late")

    def formation(scheduler, _delayer, running_batch):
        scheduler._add_request_to_queue(late)
        assert late not in scheduler.waiting_queue, "it has not been admitted: matching it would fail"
        scheduler.waiting_queue.remove(plain)
        return Batch([plain]), running_batch

    hooks.get_new_batch_prefill_raw(formation, scheduler, None, scheduler.running_batch)
    assert scheduler.waiting_queue == [*waiting, late]


def test_chunk_under_way_is_not_started_again():
    """A chunk that is prefilled in pieces is awaited, by a later parent too, and is not started twice."""
    scheduler = Scheduler(chunked_prefill_size=2)
    scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    assert scheduler.chunked_req is not None and is_fill(scheduler.chunked_req)
    scheduler.submit([A, QUESTION], "p1", max_new_tokens=1)
    assert [req.rid for req in scheduler.visible()] == ["p0", "p1"]
    (fill,) = scheduler.admission.fills.values()
    assert [parent.rid for parent in fill.fill.parents] == ["p0", "p1"]
    scheduler.run()
    assert [rid for batch in scheduler.log for rid in batch if rid.startswith("\0fill")] == [fill.rid] * 2
    assert scheduler.log[2:] == [["p0", "p1"]], "the last two tokens of the chunk left no room beside them"


def test_fill_is_no_user_request():
    """A fill ends by itself, streams and samples nothing, and its id is no prefix of a user's nor starts with one."""
    scheduler = Scheduler()
    scheduler.submit([A, QUESTION], "p0", extra_key="tenant")
    fill, _ = scheduler.visible()
    assert fill.rid.startswith("\0") and fill.finished_output
    assert fill.sampling_params.max_new_tokens == 0
    # Greedy, as SGLang sees it: one request that samples would make its whole batch sample.
    assert fill.sampling_params.top_k == 1
    assert [chunk.namespace for chunk in fill.fill.chunks] == [(CHUNK_NAMESPACE, "tenant", None)]
    assert list(fill.origin_input_ids) == list(A[1])


def test_head_of_line_blocks_under_a_small_budget():
    """A parent that does not fit is not admitted in part, and what is behind it waits as well."""
    scheduler = Scheduler(pool_size=30)
    scheduler.submit([A, QUESTION], "fits", max_new_tokens=10)
    scheduler.submit([B, C, QUESTION], "does not", max_new_tokens=10)
    scheduler.submit([(TEXT, (3,))], "plain", max_new_tokens=1)
    visible = scheduler.visible()
    assert fill_tokens(visible) == [[A[1]]]
    assert len(visible) == 2
    assert [req.rid for req in scheduler.admission.holders] == ["fits"]
    scheduler.run()


def test_plain_requests_are_left_to_sglang():
    """Without linked requests the queue is SGLang's own object, whatever the budget."""
    scheduler = Scheduler(pool_size=10)
    scheduler.submit([(TEXT, (1, 2, 3))], "plain", max_new_tokens=100)
    assert scheduler.visible() is scheduler.waiting_queue


@both_loops
@pytest.mark.parametrize("parts", [[A, B, QUESTION], [A, B, A, B], [A, B, C]], ids=["text last", "twice", "chunk last"])
def test_a_request_alone_always_runs(overlap, parts):
    """Whatever fits the pool as SGLang counts it is served, if need be alone: no budget blocks an idle scheduler."""
    prompt_len = sum(len(tokens) for _, tokens in parts)
    pool_size = prompt_len + 2 + 1 + 1  # SGLang: prompt, answer and page are strictly less than the pool
    scheduler = Scheduler(pool_size, overlap=overlap)
    for i in range(3):
        scheduler.submit(parts[i % 2 :] + parts[: i % 2], f"p{i}", max_new_tokens=2)
    scheduler.run()


def test_resident_chunks_count_as_needed_memory():
    """Locking a resident chunk takes it from what is evictable, so that admission counts it as memory it needs."""
    scheduler = Scheduler(pool_size=30)
    scheduler.warm(A, B, C)
    assert scheduler.tree_cache.evictable_size() == 15
    scheduler.submit([A, B, QUESTION], "first", max_new_tokens=9)
    scheduler.submit([C, QUESTION], "second", max_new_tokens=9)
    scheduler.visible()
    left = scheduler.pools.slots.available_size() + scheduler.tree_cache.evictable_size()
    assert [req.rid for req in scheduler.admission.holders] == ["first"]
    assert left == 30 - len(A[1] + B[1])


def test_needed_memory_is_what_locking_takes():
    """A beginning that chunks share is counted once, and what is locked already is not counted."""
    scheduler = Scheduler()
    longer = (CHUNK, (*A[1], 7, 8))
    other = (CHUNK, (*A[1][:3], 9))
    scheduler.warm(A, longer, other)
    cache = scheduler.tree_cache
    req = scheduler.submit([longer, other, A, longer, QUESTION], "p0")
    nodes = [cache.find_chunk(chunk) for chunk in req.link.prompt.chunks]
    assert cache.unlocked_size(nodes) == len(longer[1]) + 1
    cache.inc_lock_ref(nodes[1])
    assert cache.unlocked_size(nodes) == len(longer[1]) - 3
    before = cache.evictable_size()
    for node in nodes:
        cache.inc_lock_ref(node)
    assert before - cache.evictable_size() == len(longer[1]) - 3


@both_loops
def test_locked_chunk_may_be_split_before_its_parent_is_ready(overlap):
    """A parent's row is laid out from the nodes it has locked, which others may have split since."""
    scheduler = Scheduler(chunked_prefill_size=2, overlap=overlap)
    scheduler.warm(A)
    parent = scheduler.submit([B, A, QUESTION], "waits", max_new_tokens=1)
    scheduler.step()
    node = parent.link.chunks.nodes[1]
    assert not parent.link.ready and len(node.key) == 4, "though it was computed in two pieces"
    scheduler.submit([(CHUNK, A[1][:3]), QUESTION], "splits", max_new_tokens=1)
    assert len(node.key) == 1
    scheduler.run()
    assert scheduler.counts(parent)[1:] == (len(A[1]), 0b10)


@both_loops
def test_waiting_locks_do_not_starve_the_head_of_the_queue(overlap):
    """Where a ready parent lacks memory that newer parents lock, they give it up, and do not take it again first."""
    scheduler = Scheduler(pool_size=40, overlap=overlap)
    scheduler.warm(A, B, C)
    scheduler.submit([A, QUESTION], "first", max_new_tokens=30)
    scheduler.submit([B, C, QUESTION], "second", max_new_tokens=1)
    scheduler.run()
    assert ["first"] in scheduler.log


def test_revoking_releases_the_newest_parent_alone():
    """Locks go back newest first, each parent's exactly, and it is admitted again later."""
    scheduler = Scheduler()
    scheduler.warm(A, B, C)
    scheduler.submit([A, B, QUESTION], "p0")
    scheduler.submit([B, C, B, QUESTION], "p1")
    scheduler.submit([D, C, QUESTION], "p2")
    scheduler.visible()
    cache, admission = scheduler.tree_cache, scheduler.admission
    assert cache.protected_size() == 12
    (fill,) = admission.fills.values()
    assert [parent.rid for parent in fill.fill.parents] == ["p2"]

    assert cache.release_waiting_lock()
    assert (cache.protected_size(), fill.fill.parents) == (12, []), "C is still locked for p1"
    assert admission.revoke_newest()
    assert cache.protected_size() == 8
    assert admission.revoke_newest()
    assert cache.protected_size() == 0
    assert not admission.revoke_newest()
    assert not any(req.link.admitted for req in scheduler.waiting_queue)
    scheduler.run()


def test_eviction_takes_waiting_locks_when_nothing_else_is_left():
    """Memory that only waits never fails what runs: eviction revokes locks, newest first, and no more than it must."""
    scheduler = Scheduler(pool_size=40)
    scheduler.warm(A, B)
    first = scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    second = scheduler.submit([B, QUESTION], "p1", max_new_tokens=1)
    scheduler.visible()
    cache = scheduler.tree_cache
    assert cache.evict(EvictParams(num_tokens=2)).num_tokens_evicted == 2, "the text of the warm-up"
    assert first.link.admitted and second.link.admitted
    assert cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 4
    assert first.link.ready and not second.link.admitted
    assert scheduler.resident(first) == [True] and scheduler.resident(second) == [False]
    scheduler.run()


def test_locks_of_a_parent_can_go_while_its_batch_is_formed(monkeypatch):
    """What the batch allocates may take back the locks of a parent in it: its row still gets what its fills compute."""
    scheduler = Scheduler()
    scheduler.warm(A)
    launch = scheduler.admission.launch

    def launch_after_eviction(batch):
        assert scheduler.admission.revoke_newest()
        launch(batch)

    monkeypatch.setattr(scheduler.admission, "launch", launch_after_eviction)
    parent = scheduler.submit([A, B, B, QUESTION], "p0", max_new_tokens=2)
    scheduler.step()
    assert scheduler.log == [["\0fill-1", "p0"]]
    monkeypatch.undo()
    scheduler.run()
    assert len(parent.output_ids) == 2


def test_reconcile_after_an_abort():
    """An aborted parent's locks go, and so do its fills, unless they have started or others want them."""
    scheduler = Scheduler()
    scheduler.warm(A)
    aborted = scheduler.submit([A, B, C, QUESTION], "aborted")
    scheduler.submit([C, QUESTION], "stays")
    assert fill_tokens(scheduler.visible()) == [[B[1], C[1]]]
    assert scheduler.tree_cache.protected_size() == 4
    scheduler.abort(aborted)
    assert fill_tokens(scheduler.visible()) == [[C[1]]]
    assert scheduler.tree_cache.protected_size() == 0
    assert [req.rid for req in scheduler.admission.holders] == ["stays"]
    assert fill_tokens(scheduler.admission.fills.values()) == [[C[1]]]
    scheduler.run()


@both_loops
def test_started_fill_outlives_its_parent(overlap):
    """A fill under way when its only parent is aborted ends, is kept for others, and leaves nothing locked."""
    scheduler = Scheduler(chunked_prefill_size=2, overlap=overlap)
    parent = scheduler.submit([A, QUESTION], "aborted")
    scheduler.step()
    scheduler.abort(parent)
    scheduler.run()
    assert scheduler.resident(parent) == [True]
    assert scheduler.tree_cache.protected_size() == 0


@both_loops
@pytest.mark.parametrize("max_fill_tokens, num_fills", [(2, 3), (64, 2)], ids=["of one chunk", "of two"])
def test_aborted_fill_is_started_again(overlap, max_fill_tokens, num_fills):
    """When SGLang aborts a fill between two of its pieces, its parents get another one."""
    scheduler = Scheduler(chunked_prefill_size=2, overlap=overlap)
    scheduler.admission.max_fill_tokens = max_fill_tokens
    scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    first = scheduler.abort_chunked().rid
    scheduler.run()
    fills = [rid for batch in scheduler.log for rid in batch if rid.startswith("\0fill")]
    assert fills[0] == first and len(set(fills)) == num_fills
    assert scheduler.log[-1] == ["p0"]


def test_retracted_fill_is_started_again():
    """A fill that comes back to the queue is dropped there, and its parents' next admission starts another."""
    scheduler = Scheduler()
    parent = scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    fill, _ = scheduler.visible()
    scheduler._add_request_to_queue(fill)
    assert scheduler.waiting_queue == [parent]
    again, _ = scheduler.visible()
    assert again is not fill and again.fill.chunks == fill.fill.chunks
    scheduler.run()


def test_retracted_parent_is_admitted_again():
    """A retracted parent keeps its link, holds nothing while it waits, and finds its chunks, or has them filled."""
    scheduler = Scheduler()
    req = scheduler.submit([A, QUESTION], "p0", max_new_tokens=4)
    while not req.output_ids:
        scheduler.step()
    link, counts = req.link, scheduler.counts(req)
    scheduler.running_batch.reqs.clear()
    scheduler.last_batch = None
    scheduler.release(req, is_insert=False)
    req.reset_for_retract()
    scheduler.tree_cache.evict(EvictParams(num_tokens=100))
    scheduler._add_request_to_queue(req)
    assert req.link is link and not link.admitted
    scheduler.run()
    assert len(req.output_ids) == 4
    assert scheduler.counts(req) == counts, "counted once"


@both_loops
def test_decisions_repeat(overlap):
    """The same requests in the same order launch the same batches: what every tensor-parallel rank relies on."""
    logs = []
    for _ in range(2):
        scheduler = Scheduler(pool_size=60, chunked_prefill_size=5, overlap=overlap)
        dice = random.Random(7)
        for i in range(30):
            parts = [*dice.sample([A, B, C, D], dice.randint(0, 3)), QUESTION]
            scheduler.submit(parts, f"r{i}", max_new_tokens=dice.randint(1, 9))
            scheduler.step()
        scheduler.run(500)
        logs.append(scheduler.log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("forget", ["lock", "holder", "fill"])
def test_idle_check_sees_what_was_forgotten(forget):
    """A lock, a holder or a fill that outlives all requests is an error, not a leak."""
    scheduler = Scheduler()
    req = scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    fill, _ = scheduler.visible()
    fills = dict(scheduler.admission.fills)
    scheduler.run()
    hooks.on_idle(None, scheduler)
    if forget == "lock":
        scheduler.tree_cache.inc_lock_ref(scheduler.tree_cache.find_chunk(req.link.prompt.chunks[0]))
    elif forget == "holder":
        scheduler.admission.holders.append(req)
    else:
        scheduler.admission.fills.update(fills)
    with pytest.raises(RuntimeError, match="idle, but"):
        hooks.on_idle(None, scheduler)


@both_loops
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
def test_counts_are_honest(overlap, chunked_prefill_size):
    """A cold prompt reports no hits though its chunks were filled just before; a warm one reports what was there."""
    scheduler = Scheduler(overlap=overlap, chunked_prefill_size=chunked_prefill_size)
    cold = scheduler.submit([A, (TEXT, (14,)), B, A, QUESTION], "cold", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(cold) == (0, 0, 0b000)
    partly = scheduler.submit([C, QUESTION, A, B, QUESTION], "partly", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(partly) == (8, 8, 0b110)
    again = scheduler.submit([C, QUESTION, A, B, QUESTION, QUESTION], "again", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(again) == (12 + 2, 12, 0b111), "its first two text tokens are known too"
    ends_in_chunk = scheduler.submit([QUESTION, B], "chunk last", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(ends_in_chunk) == (3, 3, 0b1)


def test_counts_after_eviction_before_admission():
    """A chunk that was resident on arrival, but had to be computed after all, is no hit."""
    scheduler = Scheduler()
    scheduler.warm(A, B)
    req = scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1)
    assert req.link.hit_mask == 0b11
    holder = scheduler.tree_cache.find_chunk(req.link.prompt.chunks[1])
    scheduler.tree_cache.inc_lock_ref(holder)
    scheduler.tree_cache.evict(EvictParams(num_tokens=100))
    scheduler.tree_cache.dec_lock_ref(holder)
    scheduler.run()
    assert scheduler.counts(req) == (4, 4, 0b10)


def test_looking_for_a_chunk_counts_as_a_use():
    """The chunk that was looked for last goes last, though it was computed first."""
    scheduler = Scheduler()
    scheduler.warm(A, B)
    cache = scheduler.tree_cache
    a, b = scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1).link.prompt.chunks
    assert cache.find_chunk(b) and cache.find_chunk(a)
    while len(cache.evictable_leaves) > 1:
        cache.evict(EvictParams(num_tokens=1))
    assert cache.find_chunk(a) and not cache.find_chunk(b)


def test_only_what_is_used_of_a_chunk_has_to_be_there():
    """At the end of a prompt its last token is text: what stands before it may have been another chunk."""
    scheduler = Scheduler()
    scheduler.warm((CHUNK, A[1][:3]))
    req = scheduler.submit([A], "p0", max_new_tokens=1)
    assert req.link.hit_mask == 0b1
    scheduler.run()
    assert scheduler.counts(req) == (3, 3, 0b1)


def test_split_before_admission():
    """A chunk's node that is split after its request has arrived still ends where the chunk does."""
    scheduler = Scheduler()
    scheduler.warm(A, B)
    req = scheduler.submit([B, A, QUESTION], "p0", max_new_tokens=1)
    found = list(req.link.found)
    beginning = dataclasses.replace(req.link.prompt.chunks[1], used=2)
    assert scheduler.tree_cache.find_chunk(beginning) is found[1].parent, "of the chunk, which is a node of its own now"
    scheduler.run()
    assert scheduler.counts(req) == (8, 8, 0b11)


def test_chunk_that_another_request_fills_is_no_hit():
    """Counts say what was resident on arrival: a chunk that was only under way then was not."""
    scheduler = Scheduler(chunked_prefill_size=2)
    scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    late = scheduler.submit([A, QUESTION, QUESTION], "p1", max_new_tokens=1)
    scheduler.run()
    assert late.link.hit_mask == 0
    assert scheduler.counts(late)[1] == 0


@pytest.mark.parametrize("broken", ["not json", "{}", '{"chunks":[[0,9]],"salt":null}'])
def test_bad_layouts_are_refused_alone(broken, monkeypatch):
    """A layout that does not fit its prompt is set up to be answered with an error, without a link."""
    monkeypatch.setattr(schedule_batch, "get_parallel", lambda: types.SimpleNamespace(tp_rank=0))
    scheduler = Scheduler()
    req = new_request([A, QUESTION], rid="bad")
    req.sampling_params.custom_params["sglang_lazy"] = broken
    scheduler.admission.arrive(req)
    assert isinstance(req.to_finish, FINISH_ABORT)
    assert not is_linked(req)


def test_prompt_that_does_not_fit_beside_its_chunks_is_refused(monkeypatch):
    """Where chunks are copied, prompt and chunks are in the pool together for a moment; what cannot be is refused."""
    monkeypatch.setattr(schedule_batch, "get_parallel", lambda: types.SimpleNamespace(tp_rank=0))
    scheduler = Scheduler(pool_size=4 + 5, materialize=True)
    refused = new_request([A, QUESTION], rid="refused")
    scheduler.admission.arrive(refused)
    assert "the prompt's 5 tokens and the 4 tokens of its chunks" in refused.to_finish.message
    scheduler = Scheduler(pool_size=4 + 5 + 1, materialize=True)
    assert is_linked(scheduler.submit([A, QUESTION], "served", max_new_tokens=1))
    scheduler.run()


@both_loops
@pytest.mark.parametrize("pool_size, materialize", [(34, False), (40, True)], ids=["in place", "copies"])
@pytest.mark.parametrize("seed", range(6))
def test_everything_is_answered_in_a_tight_pool(seed, overlap, pool_size, materialize):
    """Random requests and aborts in a barely sufficient pool: all others are answered, nothing fails or stays held."""
    dice = random.Random(seed)
    chunked_prefill_size = dice.choice([3, 64])
    scheduler = Scheduler(pool_size, chunked_prefill_size, overlap, materialize=materialize)
    scheduler.admission.max_fill_tokens = dice.choice([3, 9, 64])
    reqs, aborted = [], set()
    for i in range(40):
        parts = [dice.choice([A, B, C, D, QUESTION, (CHUNK, (1, 2))]) for _ in range(dice.randint(1, 5))]
        room = pool_size - sum(len(tokens) for _, tokens in parts) - 2
        salt = dice.choice([None, None, "salt"])
        reqs.append(scheduler.submit(parts, f"r{i}", salt=salt, max_new_tokens=dice.randint(1, min(room, 12))))
        for _ in range(dice.randint(0, 3)):
            scheduler.step()
        if scheduler.waiting_queue and dice.random() < 0.2:
            req = dice.choice(scheduler.waiting_queue)
            scheduler.abort(req)
            aborted.add(req)
        if scheduler.chunked_req is not None and dice.random() < 0.2:
            aborted.add(scheduler.abort_chunked())
    scheduler.run(2000)
    for req in reqs:
        assert req in aborted or len(req.output_ids) == req.sampling_params.max_new_tokens
    scheduler.tree_cache.evict(EvictParams(num_tokens=pool_size))
    assert scheduler.pools.slots.available_size() == pool_size


def in_full(parts, rid):
    """A request for `parts` with link full."""
    req = new_request(parts, rid=rid)
    req.sampling_params.custom_params = {LAYOUT_PARAM: PromptLayout((), "salt").pack()}
    return req


def test_link_full_is_an_ordinary_request():
    scheduler = Scheduler()
    req = in_full([A, QUESTION], "full")
    scheduler._add_request_to_queue(req)
    assert not is_linked(req) and req.to_finish is None and scheduler.waiting_queue == [req]


def test_without_chunk_reuse_only_link_full_takes_chunks(monkeypatch):
    monkeypatch.setattr(schedule_batch, "get_parallel", lambda: types.SimpleNamespace(tp_rank=0))
    scheduler, queue = types.SimpleNamespace(tree_cache=object()), []
    for req, refused in ((new_request([A, QUESTION], rid="block"), True), (in_full([A, QUESTION], "full"), False)):
        hooks.add_request_to_queue(lambda _, req: queue.append(req), scheduler, req)
        assert queue[-1] is req and (req.to_finish is not None) == refused
    assert "without chunk reuse" in queue[0].to_finish.message

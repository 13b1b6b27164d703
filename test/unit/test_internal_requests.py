"""Fills and probes: they end when nobody waits for them, and cost users' requests no place and no count."""

import pytest
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.requests import CHUNK, TEXT, new_request
from sglang_lazy.core.state import fill_of, is_internal, lazy_state
from sglang_lazy.port.cache.composite import CompositeCache
from sglang_lazy.port.scheduler import steps as hooks

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])

LONG = (CHUNK, tuple(1 + i % 12 for i in range(40)))
PROBING = ("query:ratio=0.4", "blend:ratio=0.4", "static:ratio=0.4")
ASKED = (TEXT, tuple(3 + i % 7 for i in range(12)))
KINDS = {
    "one pool": {},
    "host tier": {"host_size": 200},
    "window pool": {"window": 2, "window_size": 60},
}


def begun(kind, overlap, link="block", parts=(LONG, QUESTION), warm=()):
    """A loop whose only request's fill or probe is in the middle of its prefill, and the request."""
    loop = Loop(140, overlap=overlap, chunked_prefill_size=64, link=link, **KINDS[kind])
    for chunk in warm:
        loop.submit([chunk, QUESTION], "warm", link="block", max_new_tokens=1)
        loop.run()
    loop.chunked_prefill_size = loop.producer.max_tokens = 3
    parent = loop.submit(parts, "parent")
    for _ in range(3):
        loop.step()
    assert is_internal(loop.chunked_req) and parent in loop.waiting_queue
    return loop, parent


def check_nothing_is_left(loop):
    """Neither places nor locks nor slots: everything can be evicted."""
    for _ in range(4):  # copies to the host, the last result
        loop.step()
    assert loop.is_fully_idle() and not loop.fills() and not loop.admission.internal
    assert loop.pools.rows.available_size() == loop.pools.rows.size and not loop.tree_cache.protected_size()
    loop.tree_cache.evict(EvictParams(num_tokens=140))
    assert loop.pools.num_free == 140


# Their end


@both_loops
@pytest.mark.parametrize(
    "kind, link", [*((kind, "block") for kind in KINDS), ("one pool", "copy"), ("one pool", "base+query:ratio=0.4")]
)
def test_a_fill_ends_with_its_last_parent(kind, link, overlap):
    """At the next step, whatever it had left to compute; the next prompt has the server for itself."""
    loop, parent = begun(kind, overlap, link)
    fill, passes = loop.chunked_req, len(loop.log)
    loop.abort(parent)
    loop.step()
    assert loop.chunked_req is None and not loop.fills() and fill.finished()
    plain = loop.submit([QUESTION], "plain", max_new_tokens=1)
    loop.step()
    assert loop.log[passes:] == [["plain"]]
    loop.run()
    assert plain.finished()
    check_nothing_is_left(loop)


@both_loops
@pytest.mark.parametrize("link", PROBING)
def test_a_probe_ends_with_its_parent(link, overlap):
    """While it computes, and no other is begun for a request that is gone."""
    loop, parent = begun("one pool", overlap, link, (A, ASKED), warm=[A])
    probe, passes = loop.chunked_req, len(loop.log)
    assert lazy_state(parent).probe is probe
    loop.abort(parent)
    loop.run()
    assert len(loop.log) == passes and lazy_state(parent).probe is probe
    check_nothing_is_left(loop)


@both_loops
@pytest.mark.parametrize("link", ["block", "copy", "query:ratio=0.4"])
def test_a_fill_goes_on_for_another_parent(link, overlap):
    """One that has waited as long, and one that comes in the step in which the first one leaves."""
    for early in (False, True):
        loop, parent = begun("one pool", overlap, parts=[LONG, QUESTION])
        fill = loop.chunked_req
        if early:
            others = [loop.submit([LONG, B, QUESTION], "other", link=link, max_new_tokens=2)]
            loop.step()
        loop.abort(parent)
        if not early:
            others = [loop.submit([LONG, B, QUESTION], "other", link=link, max_new_tokens=2)]
        loop.run()
        assert sum(fill.rid in batch for batch in loop.log) == 14, "each of its pieces was computed once"
        assert all(len(req.output_ids) == 2 for req in others)
        check_nothing_is_left(loop)


def test_a_fill_goes_on_for_a_parent_that_has_lost_its_locks():
    """It is still in the queue, and will be admitted again."""
    loop, parent = begun("one pool", False, parts=[LONG, QUESTION])
    fill = loop.chunked_req
    assert loop.admission.revoke_newest() and not fill.lazy.parents
    assert not loop.admission.is_abandoned(fill)
    loop.run()
    assert sum(fill.rid in batch for batch in loop.log) == 14 and parent.finished()


def test_an_aborted_prompts_chunks_are_computed_for_the_next_one():
    loop, parent = begun("one pool", True)
    loop.abort(parent)
    loop.step()
    again = loop.submit([LONG, QUESTION], "again")
    loop.run()
    assert len(again.output_ids) == 3 and loop.counts(again) == (0, 0, 0)


@both_loops
def test_a_cache_is_flushed_after_aborts_while_paused(overlap):
    """Retracting for the pause ends the fill; no step follows that would release what waiting prompts hold."""
    loop = Loop(140, overlap=overlap)
    loop.warm(A)
    loop.chunked_prefill_size = loop.producer.max_tokens = 3
    parents = [loop.submit([A, LONG, QUESTION], f"p{i}") for i in range(2)]
    for _ in range(3):
        loop.step()
    assert fill_of(loop.chunked_req) is not None
    loop.pause_generation(PauseGenerationReqInput(mode="retract"))
    for parent in parents:
        loop.abort(parent)
    assert loop.admission.holders

    reset, held = loop.tree_cache.reset, []

    def count_and_reset():
        held.append((len(loop.admission.holders), len(loop.fills()), loop.tree_cache.tree.num_locks))
        reset()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompositeCache, "reset", lambda _cache: count_and_reset())
        assert loop.flush_cache()
    assert held == [(0, 0, 0)]
    req = loop.submit([A, QUESTION], "after")
    loop.run()
    assert len(req.output_ids) == 3


def test_a_refused_request_begins_nothing():
    """SGLang answers it at once where the queue is full; nothing is looked up or fetched for it."""
    loop = Loop()
    loop.submit([QUESTION], "waits")
    req = new_request([A, QUESTION], rid="refused")
    hooks.add_request_to_queue(lambda *_: None, loop, req)
    assert lazy_state(req) is None and not loop.admission.arrival.linked_waiting


@pytest.mark.parametrize("link", ["block", "query:ratio=0.4"])
def test_sglang_tells_no_client_of_an_internal_request_that_it_aborts(link):
    loop, parent = begun("one pool", False, link)
    told = []
    for req in (loop.chunked_req, parent):
        hooks.send_abort_output(lambda _scheduler, message, _req: told.append(message.rid), loop, AbortReq(), req)
    assert told == [AbortReq().rid]


# Places


@both_loops
@pytest.mark.parametrize("places", [2, 4, 8])
@pytest.mark.parametrize("link", ["block", "copy", *PROBING])
def test_the_last_place_is_for_a_prompt_whose_chunk_is_missing(overlap, places, link):
    """It begins to answer while the others still do. So does one whose chunks are cached, for which a probe runs."""
    loop = Loop(300, overlap=overlap, scheduler={"max_running": places}, num_rows=places)
    for i in range(places - 1):
        loop.submit([(TEXT, (1, 2, 3 + i))], f"r{i}", max_new_tokens=30)
    loop.step()
    for chunks in ([A], [A], [B, A]):
        parent = loop.submit([*chunks, (TEXT, (9, 9, len(chunks)))], "parent", link=link, max_new_tokens=2)
        for _ in range(10):
            loop.step()
        assert parent.finished() and len(loop.running_batch.reqs) == places - 1
    loop.run()


@both_loops
def test_a_parent_takes_one_place_from_less_important_requests(overlap):
    """Its fill has taken it, and gives it back."""
    loop = Loop(300, overlap=overlap, scheduler={"max_running": 3, "prioritizes": True}, num_rows=3)
    low = [loop.submit([(TEXT, (1, 2, 3 + i))], f"r{i}", max_new_tokens=30, priority=0) for i in range(3)]
    loop.step()
    high = loop.submit([A, QUESTION], "high", priority=9, max_new_tokens=3)
    while not high.output_ids:
        loop.step()
    assert [req.retraction_count for req in low].count(0) == 2
    loop.run()
    assert all(len(req.output_ids) == 30 for req in low)


@both_loops
def test_memory_that_a_waiting_parent_gives_back_is_there_at_once(overlap):
    """Not only when a running request ends, though SGLang has found no room before."""
    loop = Loop(40, overlap=overlap, scheduler={"max_adapters": 1})
    loop.submit([A, B, C, QUESTION], "warm", lora_id="x", max_new_tokens=1)
    loop.run()
    runs = loop.submit([(TEXT, (1, 2, 3))], "runs", max_new_tokens=12)
    loop.step()
    parent = loop.submit([A, B, C, QUESTION], "no adapter", lora_id="x", max_new_tokens=1)
    plain = loop.submit([(TEXT, tuple(2 + i % 7 for i in range(13)))], "plain", max_new_tokens=2)
    for _ in range(2):
        loop.step()
    assert loop.admission.holders == [parent] and loop.running_batch.batch_is_full
    loop.abort(parent)
    for _ in range(4):
        loop.step()
    assert plain.output_ids and not runs.finished()
    loop.run()


# Counts


def test_only_users_requests_count_while_a_batch_is_formed():
    """For the limit of the queue, to which preempted requests return; for the delay of prefills; and for the most
    requests per batch."""
    loop = Loop(300, scheduler={"max_running": 8})
    for i, chunk in enumerate((A, B, C, D)):
        loop.submit([chunk, QUESTION], f"p{i}")
    held = loop.submit([LONG, LONG, QUESTION], "waits", max_new_tokens=250)  # no room
    seen, stock = [], loop.get_prefill_adder_class()

    class Adder(stock):
        def add_one_req(self, req, *args, **kwargs):
            self.prefill_max_requests = 2
            result = super().add_one_req(req, *args, **kwargs)
            seen.append((req.rid, self.waiting_queue_len, len(loop.waiting_queue)))
            return result

    loop.get_prefill_adder_class = lambda: Adder
    loop.step()
    assert {entry[1] for entry in seen} == {5} and held in loop.waiting_queue
    assert [rid for rid in loop.log[-1] if "\0" not in rid] == ["p0", "p1"] and len(loop.log[-1]) == 4


def test_a_preempted_request_returns_to_the_whole_queue():
    """SGLang compares its length with --max-queued-requests then, and may drop its least important request."""
    loop = Loop(300, scheduler={"max_running": 1, "prioritizes": True}, num_rows=4)
    low = loop.submit([(TEXT, (1, 2, 3))], "low", priority=0, max_new_tokens=9)
    loop.step()
    high = [loop.submit([chunk, QUESTION], f"p{i}", priority=9) for i, chunk in enumerate((A, B, LONG))]
    append, queues = loop._add_request_to_queue, []

    def add(req):
        append(req)
        queues.append([*loop.waiting_queue])

    loop._add_request_to_queue = add
    loop.step()
    assert queues == [[*high, low]]
    assert low.finished_reason is None or not isinstance(low.finished_reason, FINISH_ABORT)
    loop.run()

"""Admission of linked requests: which requests batch formation sees, what they lock, and how locks are released."""

import random

import pytest
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import release_kv_cache

from fakes.loop import QUESTION, A, B, C, D, Loop, fill_tokens
from fakes.requests import CHUNK, TEXT, new_request
from sglang_lazy.core.state import fill_of
from sglang_lazy.port.scheduler import steps as hooks
from sglang_lazy.port.scheduler import upkeep

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def test_visible_queue_keeps_the_order():
    """Batch formation sees fills right before their parents, while every request keeps its place in the real queue."""
    scheduler = Loop()
    scheduler.warm(D)
    reqs = [
        scheduler.submit([QUESTION], "plain"),
        scheduler.submit([B, A, QUESTION], "cold"),
        scheduler.submit([QUESTION, D, QUESTION], "warm"),
        scheduler.submit([A, C, QUESTION], "shares"),
        scheduler.submit([(TEXT, (3, 4))], "last"),
    ]
    visible = scheduler.visible()
    assert [fill_tokens([req])[0] if fill_of(req) is not None else req.rid for req in visible] == [
        "plain",
        [B[1], A[1]],
        "cold",
        "warm",
        [C[1]],
        "shares",
        "last",
    ]
    assert scheduler.waiting_queue == reqs
    assert scheduler.visible() == visible, "looking is idempotent"
    assert not any(fill.kv.holds_kv for fill in visible if fill_of(fill) is not None)


def test_queue_is_put_back_in_order():
    """Requests that batch formation did not take keep their places, parents and newcomers included, without fills."""
    scheduler = Loop()
    first = scheduler.submit([A, QUESTION], "parent")
    plain = [scheduler.submit([(TEXT, (i,))], f"plain-{i}") for i in range(3)]
    newcomer = new_request([QUESTION], rid="newcomer")

    def formation(scheduler, _delayer, running_batch):
        scheduler.policy.calc_priority(scheduler.waiting_queue, running_batch)
        assert [fill_of(req) is not None for req in scheduler.waiting_queue] == [True, False, False, False, False]
        scheduler.waiting_queue = [*scheduler.waiting_queue[:3], scheduler.waiting_queue[4]]
        scheduler.waiting_queue.append(newcomer)
        return ScheduleBatch(reqs=[plain[1]]), running_batch

    hooks.get_new_batch_prefill_raw(formation, scheduler, None, scheduler.running_batch)
    assert scheduler.waiting_queue == [first, plain[0], plain[2], newcomer]


@pytest.mark.parametrize("others", [0, 1], ids=["into a plain queue", "beside another parent"])
def test_parent_that_arrives_during_batch_formation(others):
    """SGLang queues requests during batch formation: those whose grammar is ready before it sorts the queue, and
    preempted ones at the end."""
    scheduler = Loop()
    plain = scheduler.submit([QUESTION], "plain")
    waiting = [scheduler.submit([B, QUESTION], "other") for _ in range(others)]
    early, late = (new_request([A, QUESTION], rid=name) for name in ("early", "late"))

    def formation(scheduler, _delayer, running_batch):
        scheduler._add_request_to_queue(early)
        scheduler.policy.calc_priority(scheduler.waiting_queue, running_batch)
        fill, last = scheduler.waiting_queue[-2:]
        assert last is early and fill_of(fill).parents == [early]
        scheduler.waiting_queue.remove(plain)
        scheduler._add_request_to_queue(late)
        return ScheduleBatch(reqs=[plain]), running_batch

    hooks.get_new_batch_prefill_raw(formation, scheduler, None, scheduler.running_batch)
    assert scheduler.waiting_queue == [*waiting, early, late]


def test_head_of_line_blocks_under_a_small_budget():
    """A parent that does not fit is not admitted in part, and what is behind it waits too."""
    scheduler = Loop(pool_size=30)
    scheduler.submit([A, QUESTION], "fits", max_new_tokens=10)
    scheduler.submit([B, C, QUESTION], "does not", max_new_tokens=10)
    scheduler.submit([(TEXT, (3,))], "plain", max_new_tokens=1)
    visible = scheduler.visible()
    assert fill_tokens(visible) == [[A[1]]]
    assert len(visible) == 2
    assert [req.rid for req in scheduler.admission.holders] == ["fits"]
    scheduler.run()


def test_plain_requests_are_left_to_sglang():
    """Without linked requests batch formation gets SGLang's own queue object, whatever the budget."""
    scheduler = Loop(pool_size=10)
    scheduler.submit([(TEXT, (1, 2, 3))], "plain", max_new_tokens=100)
    assert scheduler.visible() is scheduler.waiting_queue


@both_loops
@pytest.mark.parametrize("parts", [[A, B, QUESTION], [A, B, A, B], [A, B, C]], ids=["text last", "twice", "chunk last"])
def test_a_request_alone_always_runs(overlap, parts):
    """A request that fits the pool by SGLang's count is served, alone if need be: no budget blocks an idle
    scheduler."""
    prompt_len = sum(len(tokens) for _, tokens in parts)
    pool_size = prompt_len + 2 + 1 + 1  # SGLang wants prompt, answer and a page to be less than the pool
    scheduler = Loop(pool_size, overlap=overlap)
    for i in range(3):
        scheduler.submit(parts[i % 2 :] + parts[: i % 2], f"p{i}", max_new_tokens=2)
    scheduler.run()


def test_resident_chunks_count_as_needed_memory():
    """Locking a resident chunk makes it unevictable, so admission counts it as memory that the request needs."""
    scheduler = Loop(pool_size=30)
    scheduler.warm(A, B, C)
    assert scheduler.tree_cache.evictable_size() == 15
    scheduler.submit([A, B, QUESTION], "first", max_new_tokens=9)
    scheduler.submit([C, QUESTION], "second", max_new_tokens=9)
    scheduler.visible()
    left = scheduler.pools.slots.available_size() + scheduler.tree_cache.evictable_size()
    assert [req.rid for req in scheduler.admission.holders] == ["first"]
    assert left == 30 - len(A[1] + B[1])


def test_needed_memory_is_what_locking_takes():
    """A prefix that chunks share is counted once, and what is already locked is not counted."""
    scheduler = Loop()
    longer = (CHUNK, (*A[1], 7, 8))
    other = (CHUNK, (*A[1][:3], 9))
    scheduler.warm(A, longer, other)
    cache = scheduler.tree_cache
    req = scheduler.submit([longer, other, A, longer, QUESTION], "p0")
    nodes = [cache.store.find(chunk) for chunk in req.lazy.prompt.chunks]
    assert cache.store.unlocked_size(nodes) == len(longer[1]) + 1
    cache.tree.lock(nodes[1])
    assert cache.store.unlocked_size(nodes) == len(longer[1]) - 3
    before = cache.evictable_size()
    for node in nodes:
        cache.tree.lock(node)
    assert before - cache.evictable_size() == len(longer[1]) - 3


@both_loops
def test_locked_chunk_may_be_split_before_its_parent_is_ready(overlap):
    """A parent's row is laid out from the nodes it has locked; other requests may split them first."""
    scheduler = Loop(chunked_prefill_size=2, overlap=overlap)
    scheduler.warm(A)
    parent = scheduler.submit([B, A, QUESTION], "waits", max_new_tokens=1)
    scheduler.step()
    node = parent.lazy.chunks.nodes[1]
    assert not parent.lazy.ready and len(node) == 4, "one node, though computed in two pieces"
    scheduler.submit([(CHUNK, A[1][:3]), QUESTION], "splits", max_new_tokens=1)
    assert len(node) == 1
    scheduler.run()
    assert scheduler.counts(parent)[1:] == (len(A[1]), 0b10)


@both_loops
def test_waiting_locks_do_not_starve_the_head_of_the_queue(overlap):
    """When a ready parent needs memory that newer parents lock, they give it up, and do not lock it again before it
    runs."""
    scheduler = Loop(pool_size=40, overlap=overlap)
    scheduler.warm(A, B, C)
    scheduler.submit([A, QUESTION], "first", max_new_tokens=30)
    scheduler.submit([B, C, QUESTION], "second", max_new_tokens=1)
    scheduler.run()
    assert ["first"] in scheduler.log


def test_revoking_releases_the_newest_parent_alone():
    """Locks are revoked newest first, exactly one parent's at a time; that parent is admitted again later."""
    scheduler = Loop()
    scheduler.warm(A, B, C)
    scheduler.submit([A, B, QUESTION], "p0")
    scheduler.submit([B, C, B, QUESTION], "p1")
    scheduler.submit([D, C, QUESTION], "p2")
    scheduler.visible()
    cache, admission = scheduler.tree_cache, scheduler.admission
    assert cache.protected_size() == 12
    (fill,) = scheduler.fills()
    assert [parent.rid for parent in fill.lazy.parents] == ["p2"]

    assert cache.tree.release_lock()
    assert (cache.protected_size(), fill.lazy.parents) == (12, []), "C is still locked for p1"
    assert admission.revoke_newest()
    assert cache.protected_size() == 8
    assert admission.revoke_newest()
    assert cache.protected_size() == 0
    assert not admission.revoke_newest()
    assert not any(req.lazy.admitted for req in scheduler.waiting_queue)
    scheduler.run()


def test_eviction_takes_waiting_locks_when_nothing_else_is_left():
    """Waiting requests never cost running ones their memory: eviction revokes locks, newest first, and no more than
    needed."""
    scheduler = Loop(pool_size=40)
    scheduler.warm(A, B)
    first = scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    second = scheduler.submit([B, QUESTION], "p1", max_new_tokens=1)
    scheduler.visible()
    cache = scheduler.tree_cache
    assert cache.evict(EvictParams(num_tokens=2)).num_tokens_evicted == 2, "the warm-up's text goes first"
    assert first.lazy.admitted and second.lazy.admitted
    assert cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 4
    assert first.lazy.ready and not second.lazy.admitted
    assert scheduler.resident(first) == [True] and scheduler.resident(second) == [False]
    scheduler.run()


def test_a_parents_locks_may_be_revoked_while_its_batch_is_formed(monkeypatch):
    """Allocating for a batch may revoke the locks of a parent in it; its row still receives what its fills compute."""
    scheduler = Loop()
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
    """An aborted parent loses its locks, and its fills unless they have started or others wait for them."""
    scheduler = Loop()
    scheduler.warm(A)
    aborted = scheduler.submit([A, B, C, QUESTION], "aborted")
    scheduler.submit([C, QUESTION], "stays")
    assert fill_tokens(scheduler.visible()) == [[B[1], C[1]]]
    assert scheduler.tree_cache.protected_size() == 4
    scheduler.abort(aborted)
    assert fill_tokens(scheduler.visible()) == [[C[1]]]
    assert scheduler.tree_cache.protected_size() == 0
    assert [req.rid for req in scheduler.admission.holders] == ["stays"]
    assert fill_tokens(scheduler.fills()) == [[C[1]]]
    scheduler.run()


def test_retracted_parent_is_admitted_again():
    """A retracted parent keeps its layout and holds nothing while it waits; its chunks are then found, or filled
    again."""
    scheduler = Loop()
    req = scheduler.submit([A, QUESTION], "p0", max_new_tokens=4)
    while not req.output_ids:
        scheduler.step()
    state, counts = req.lazy, scheduler.counts(req)
    scheduler.running_batch.reqs.clear()
    scheduler.last_batch = None
    release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()
    scheduler.tree_cache.evict(EvictParams(num_tokens=100))
    scheduler._add_request_to_queue(req)
    assert req.lazy is state and not state.admitted
    scheduler.run()
    assert len(req.output_ids) == 4
    assert scheduler.counts(req) == counts, "counted once"


@both_loops
def test_decisions_are_deterministic(overlap):
    """The same requests in the same order launch the same batches, as tensor parallelism needs: each rank decides by
    itself."""
    logs = []
    for _ in range(2):
        scheduler = Loop(pool_size=60, chunked_prefill_size=5, overlap=overlap)
        dice = random.Random(7)
        for i in range(30):
            parts = [*dice.sample([A, B, C, D], dice.randint(0, 3)), QUESTION]
            scheduler.submit(parts, f"r{i}", max_new_tokens=dice.randint(1, 9))
            scheduler.step()
        scheduler.run(500)
        logs.append(scheduler.log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("forget", ["lock", "holder", "fill"])
def test_the_idle_check_finds_leaks(forget):
    """A lock, a holder or a fill that outlives all requests raises an error instead of leaking."""
    scheduler = Loop()
    req = scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    fill, _ = scheduler.visible()
    fills = dict(scheduler.store.pending)
    scheduler.run()
    upkeep.check(scheduler)
    if forget == "lock":
        scheduler.tree_cache.tree.lock(scheduler.store.find(req.lazy.prompt.chunks[0]))
    elif forget == "holder":
        scheduler.admission.holders.append(req)
    else:
        scheduler.store.pending.update(fills)
    with pytest.raises(RuntimeError, match="idle, but"):
        upkeep.check(scheduler)


@both_loops
@pytest.mark.parametrize("pool_size, link", [(34, "block"), (40, "copy")])
@pytest.mark.parametrize("ratio", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(6))
def test_everything_is_answered_in_a_tight_pool(seed, ratio, overlap, pool_size, link):
    """Random requests and aborts in a pool that barely suffices: all others finish, and nothing stays locked.

    ratio: the share of running requests' remaining output that SGLang reserves.
    """
    dice = random.Random(seed)
    chunked_prefill_size = dice.choice([3, 64])
    scheduler = Loop(
        pool_size,
        chunked_prefill_size=chunked_prefill_size,
        overlap=overlap,
        link=link,
        max_fill_tokens=dice.choice([3, 9, 64]),
    )
    scheduler.new_token_ratio_tracker.current = ratio
    reqs, aborted = [], set()
    for i in range(40):
        parts = [dice.choice([A, B, C, D, QUESTION, (CHUNK, (1, 2))]) for _ in range(dice.randint(1, 5))]
        room = pool_size - sum(len(tokens) for _, tokens in parts) - 2
        cache_salt = dice.choice([None, None, "salt"])
        max_new_tokens = dice.randint(1, min(room, 12))
        reqs.append(scheduler.submit(parts, f"r{i}", cache_salt=cache_salt, max_new_tokens=max_new_tokens))
        aborted |= scheduler.disturb(dice)
    scheduler.run(2000)
    for req in reqs:
        assert req in aborted or len(req.output_ids) == req.sampling_params.max_new_tokens
    scheduler.tree_cache.evict(EvictParams(num_tokens=pool_size))
    assert scheduler.pools.slots.available_size() == pool_size

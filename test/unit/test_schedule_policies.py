"""SGLang's priorities and schedule policies: parents go in that order, fills before them, and chunks count as found."""

import random
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.requests import CHUNK, TEXT
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.state import fill_of
from sglang_lazy.port.scheduler import steps

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])

LONG = (CHUNK, tuple(1 + i % 12 for i in range(40)))
LEAD = (TEXT, tuple(2 + i % 7 for i in range(40)))


def prioritizing(pool_size=100, **options):
    """A scheduler in which high priorities go first."""
    scheduler = {"prioritizes": True, **options.pop("scheduler", {})}
    return Loop(pool_size, scheduler=scheduler, **options)


def order(loop):
    """The ids of users' requests in the order in which they were first launched."""
    return [rid for rid in dict.fromkeys(rid for batch in loop.log for rid in batch) if "\0" not in rid]


# Priorities


@both_loops
def test_parents_go_by_priority_and_fills_with_them(overlap):
    loop = prioritizing(overlap=overlap, chunked_prefill_size=6)
    reqs = [
        loop.submit([chunk, QUESTION], f"p{priority}", priority=priority, max_new_tokens=2)
        for chunk, priority in ((A, 1), (B, 3), (C, 2), (D, None))
    ]
    loop.run()
    assert order(loop) == ["p3", "p2", "p1", "pNone"]
    assert all(len(req.output_ids) == 2 for req in reqs)


def test_a_fill_that_somebody_more_important_waits_for():
    """It has not started for its owner, and takes its place among others by the other one."""
    loop = prioritizing(chunked_prefill_size=5)
    loop.submit([B, QUESTION], "first", priority=99)
    loop.submit([A, QUESTION], "owner", priority=1)
    loop.step()  # the fill of B has the batch
    (fill,) = (fill for fill in loop.fills() if fill_of(fill).owner.rid == "owner")
    assert fill.priority == 1
    loop.submit([A, QUESTION], "other", priority=9)
    loop.submit([C, QUESTION], "another", priority=5)
    loop.run()
    assert fill.priority == 9 and order(loop)[-3:].index("other") < order(loop)[-3:].index("another")


@both_loops
@pytest.mark.parametrize("link", ["block", "copy", "query:ratio=0.4"])
def test_a_parent_takes_the_place_of_others(overlap, link):
    """Plain ones and parents, which are answered later; the pools check that nobody's slots are lost."""
    loop = prioritizing(120, overlap=overlap, link=link, scheduler={"max_running": 2})
    low = [loop.submit([A, B, QUESTION], "parent", priority=0, max_new_tokens=20)]
    low.append(loop.submit([(TEXT, (7, 8, 9))], "plain", priority=0, max_new_tokens=20))
    for _ in range(6):
        loop.step()
    assert {req.rid for req in loop.running_batch.reqs} == {"parent", "plain"}
    high = loop.submit([C, A, QUESTION], "high", priority=99, max_new_tokens=3)
    while not high.finished():
        loop.step()
    assert not any(req.finished() for req in low)
    loop.run()
    assert [len(req.output_ids) for req in (*low, high)] == [20, 20, 3]


@both_loops
@pytest.mark.parametrize("first, second", [(None, 5), (5, None), (5, 9)])
def test_a_server_without_priorities_ignores_them(overlap, first, second):
    """SGLang lets them pass: those who wait for one fill may have any or none."""
    loop = Loop(overlap=overlap, chunked_prefill_size=2)
    reqs = [loop.submit([A, QUESTION], "first", priority=first, max_new_tokens=1)]
    loop.step()
    (fill,) = loop.fills()
    reqs.append(loop.submit([A, QUESTION], "second", priority=second, max_new_tokens=1))
    loop.run()
    assert [parent.rid for parent in fill_of(fill).parents] == ["first", "second"]
    assert all(len(req.output_ids) == 1 for req in reqs)


def test_a_probe_whose_parent_has_no_priority():
    """SGLang gives it the lowest, which the probe has as well, where it asks for the place of a request that runs."""
    loop = prioritizing(scheduler={"max_running": 1})
    plain = loop.submit([(TEXT, (7, 8, 9))], "plain", priority=0, max_new_tokens=6)
    loop.step()
    parent = loop.submit([A, QUESTION], "parent", link="query:ratio=0.4", max_new_tokens=1)
    loop.run()
    assert order(loop) == ["plain", "parent"] and len(plain.output_ids) == 6 and len(parent.output_ids) == 1


def test_what_less_important_parents_hold_is_there_for_others():
    """One waits with its chunks computed and locked, where another comes that needs the memory, and nothing runs."""
    loop = prioritizing(24, chunked_prefill_size=4)
    low = loop.submit([A, B, QUESTION], "low", priority=0, max_new_tokens=2)
    while not all(loop.resident(low)):
        loop.step()
    assert low in loop.waiting_queue and loop.admission.holders == [low]
    long = (TEXT, tuple(i % 9 for i in range(12)))
    high = loop.submit([C, long, QUESTION], "high", priority=1, max_new_tokens=3)
    loop.run()
    assert order(loop) == ["high", "low"] and high.finished() and low.finished()


# The longest match first


def lpm(pool_size=200, **options):
    return Loop(pool_size, scheduler={"policy": "lpm"}, **options)


def test_those_with_more_in_the_cache_go_first():
    """Chunks count as text does, at any place, and cached text counts beside them."""
    loop = lpm(chunked_prefill_size=4)
    loop.warm(A, B)
    loop.submit([LEAD, (CHUNK, (13,)), QUESTION], "lead", max_new_tokens=1)
    loop.run()
    loop.log.clear()
    loop.submit([D, QUESTION], "nothing")
    loop.submit([(TEXT, (9,)), C, A, QUESTION], "one chunk")
    loop.submit([B, (TEXT, (9,)), A, QUESTION], "two chunks")
    loop.submit([LEAD, D, QUESTION], "text")
    loop.submit([LEAD, B, QUESTION], "text and chunk")
    loop.run()
    assert order(loop) == ["text and chunk", "text", "two chunks", "one chunk", "nothing"]


def test_probes_go_by_what_they_find():
    loop = lpm(link="query:ratio=0.4", chunked_prefill_size=4)
    loop.warm(A, B)
    for parts in ([D, QUESTION], [(TEXT, (9,)), C, A, QUESTION], [B, (TEXT, (9,)), A, QUESTION]):
        loop.submit(parts, "parent")
    loop.run()
    probes = [rid for rid in dict.fromkeys(rid for batch in loop.log for rid in batch) if "probe" in rid]
    assert [rid[-1] for rid in probes] == ["4", "3", "2"]  # those of A and B came before


def test_what_the_host_has_counts():
    loop = lpm(60, host_size=120, chunked_prefill_size=5)
    loop.warm(A)
    loop.step()
    loop.tree_cache.evict(EvictParams(num_tokens=loop.tree_cache.evictable_size()))
    loop.submit([B, QUESTION], "nothing", max_new_tokens=1)
    loop.submit([A, QUESTION], "on the host", max_new_tokens=1)
    loop.run()
    assert order(loop) == ["on the host", "nothing"]


def test_ranking_lays_out_nothing():
    """Parents that wait are not admitted by it, their rows are not begun, and it may be asked over and over."""
    loop = lpm(30)
    loop.submit([A, B, QUESTION], "big", max_new_tokens=8)
    loop.step()
    parent = loop.submit([A, C, QUESTION], "waits", max_new_tokens=12)
    for _ in range(3):
        loop.step()
        loop.pools.check(loop.admission.holders)
    assert not hasattr(parent.lazy, "row") and parent.num_matched_prefix_tokens == 4
    loop.run()


@pytest.mark.parametrize(
    "beginning, expected",
    [
        ([LONG], ["first", "same", "other"]),
        ([LEAD, A], ["first", "other", "same"]),
        ([QUESTION, LONG], ["first", "same", "other"]),
    ],
    ids=["a chunk", "leading text", "a chunk behind text"],
)
def test_requests_that_begin_alike(beginning, expected):
    """SGLang lets one of several go first, so that the others find its beginning. A chunk is computed once in any case,
    for all of them; leading text is not."""
    loop = lpm()
    for rid, parts in (("first", beginning), ("same", beginning), ("other", [B])):
        loop.submit([*parts, (TEXT, (len(rid), 15))], rid)
    loop.step()
    assert order(loop) == expected
    loop.run()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "lof", "random"])
@pytest.mark.parametrize("prioritizes", [False, True], ids=["", "priorities"])
@pytest.mark.parametrize("seed", range(3))
def test_everybody_is_answered(policy, prioritizes, seed):
    """Whatever the order: chunks, text, probes, aborts, little memory, and priorities where the policy has them."""
    dice = random.Random(f"{policy} {prioritizes} {seed}")
    loop = Loop(
        60,
        overlap=dice.random() < 0.5,
        chunked_prefill_size=dice.choice([5, 9, 64]),
        scheduler={"policy": "fcfs" if prioritizes else policy, "prioritizes": prioritizes, "max_running": 3},
    )
    parts = [A, B, C, D, (CHUNK, (1, 2)), (TEXT, (9, 8, 7)), (TEXT, (3,))]
    reqs, aborted = [], set()
    for i in range(25):
        drawn = [dice.choice(parts) for _ in range(dice.randint(1, 4))]
        link = dice.choice(["block", "base", "copy", "query:ratio=0.4", "epic:tokens=1"])
        priority = dice.choice([None, 0, 50]) if prioritizes else None
        adapter = dice.choice([None, "x"])
        reqs.append(
            loop.submit(
                [*drawn, QUESTION],
                f"r{i}",
                link=link,
                max_new_tokens=dice.randint(1, 8),
                priority=priority,
                lora_id=adapter,
            )
        )
        for _ in range(dice.randint(0, 3)):
            loop.step()
        if loop.waiting_queue and dice.random() < 0.15:
            aborted.add(dice.choice(loop.waiting_queue))
            for req in aborted & set(loop.waiting_queue):
                loop.abort(req)
    loop.run(2000)
    for req in reqs:
        assert req in aborted or len(req.output_ids) == req.sampling_params.max_new_tokens
    loop.tree_cache.evict(EvictParams(num_tokens=60))
    assert loop.pools.slots.available_size() == 60


def test_fills_do_not_delay_later_prefills():
    """SGLang waits until as many requests wait as batches had lately: users' requests, as those that wait are."""
    told, attempt = [], SimpleNamespace(finalize=lambda *, actual_prefill_bs: told.append(actual_prefill_bs))
    batch, running = SimpleNamespace(reqs=[new_fill(), new_fill(), SimpleNamespace()]), SimpleNamespace()
    running.is_empty, admission = lambda: False, Mock(gave_back=False, shown=None)
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace(admission=admission), waiting_queue=[], chunked_req=None)
    steps.get_new_batch_prefill_raw(lambda *_: (batch, running), scheduler, attempt, running)
    attempt.finalize(actual_prefill_bs=len(batch.reqs))
    assert told == [1]


def new_fill():
    return SimpleNamespace(lazy=Fill([], None))

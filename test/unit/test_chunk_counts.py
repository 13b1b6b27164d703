"""The scheduler's counters of chunks, over traffic whose numbers are known."""

import itertools
import time
from array import array
from functools import partial

import prometheus_client
import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_chunk_lists import deleted, id_of, listed
from test_pins import pin

from fakes.loop import QUESTION, A, B, C, Loop
from fakes.requests import CHUNK, TEXT
from sglang_lazy.chunks import catalog, counts
from sglang_lazy.chunks.counts import Census, Histogram, Occupancy
from sglang_lazy.chunks.metrics import TIME_SHARE, ChunkMetrics

BUDGET = "no more than 10 tokens can be pinned (--lazy-max-pinned)"
pytestmark = pytest.mark.usefixtures("sglang_context")


def ask(loop, *chunks, rid="r", **options):
    req = loop.submit([*chunks, QUESTION], rid, **options)
    loop.run()
    return req


def reuse(loop):
    counts = loop.store.counts
    return counts.num_references, counts.num_hits, counts.num_reused_tokens, counts.num_filled_tokens


def test_a_census_counts_each_chunk_once(monkeypatch):
    """Chunks come and go between the steps of a census; those present throughout are counted once."""
    monkeypatch.setattr(counts, "AT_ONCE", 2)
    monkeypatch.setattr(catalog, "_SHARE", 1)
    loop = Loop()
    loop.warm(A, B, C)
    census = Census(loop.store)
    assert census.step() is None
    deleted(loop, id_of(A))
    loop.warm(A)  # used again, so now the most recent
    assert census.step().resident == (4, 16)
    assert census.step() is None
    loop.pools.flush()
    assert census.step().resident == (2, 8)
    assert census.step().resident == (0, 0)


def occupancy(loop):
    return {name: tuple(share) for name, share in Occupancy.of(loop.store.catalog)._asdict().items()}


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_reuse(overlap):
    loop = Loop(overlap=overlap)
    ask(loop, A, B)  # four tokens each, both missing
    assert reuse(loop) == (2, 0, 0, 8)
    ask(loop, B, (TEXT, (14,)), A, C)  # C has four as well
    assert reuse(loop) == (5, 2, 8, 12)
    ask(loop, A, A, link="epic:tokens=1")
    assert reuse(loop) == (7, 4, 8 + 4 + 3, 12)
    ask(loop, (TEXT, (14, 15)))
    ask(loop, A, link="full")
    assert reuse(loop) == (7, 4, 15, 12)


def test_a_chunk_missed_by_two_prompts_is_computed_once():
    loop = Loop()
    for rid in ("p0", "p1"):
        loop.submit([A, QUESTION], rid)
    loop.run()
    assert reuse(loop) == (2, 0, 0, 4)
    assert sum(loop.store.counts.wait_seconds.counts) == 2
    assert sum(loop.store.counts.fill_seconds.counts) == 1


def test_cached_prefixes_are_not_counted_as_computed():
    loop = Loop()
    ask(loop, (CHUNK, (1, 2, 3)))
    ask(loop, (CHUNK, (1, 2, 3, 4, 5)))
    assert reuse(loop) == (2, 0, 0, 3 + 2)
    ask(loop, A, link="base")  # after a preamble of two tokens
    ask(loop, B, link="base")
    assert reuse(loop) == (4, 0, 0, 5 + 2 + 4 + 4)


def test_loads_count_neither_as_waits_nor_as_fills():
    loop = Loop(pool_size=40, host_size=80)
    loop.warm(A, B)
    counts = loop.store.counts
    before = sum(counts.wait_seconds.counts), sum(counts.fill_seconds.counts)
    ask(loop, A)
    loop.tree_cache.evict(EvictParams(num_tokens=40))
    ask(loop, A, B)  # loaded from the host
    assert (sum(counts.wait_seconds.counts), sum(counts.fill_seconds.counts)) == before
    assert 0 < counts.wait_seconds.total < 60 and 0 < counts.fill_seconds.total < 60


@pytest.mark.parametrize("host_size", [0, 80])
def test_evictions_and_hits_of_evicted_chunks(host_size):
    loop = Loop(pool_size=40, host_size=host_size)
    loop.warm(A, B)
    for _ in range(3):
        ask(loop, A, (TEXT, (14,)))
    counts = loop.store.counts
    assert (counts.num_evicted_chunks, counts.num_evicted_tokens) == (0, 0)
    loop.tree_cache.evict(EvictParams(num_tokens=40))
    assert [sum(column) for column in zip(*counts.evicted_lately.rows(None, False, time.time()), strict=True)][1:] == [
        2,
        8,
    ]
    assert (counts.num_evicted_chunks, counts.num_evicted_tokens) == (2, 8)  # their texts were evicted too, uncounted
    if host_size:
        assert counts.hits_per_chunk.counts == [0] * 12
        loop.pools.flush()
    assert counts.hits_per_chunk.counts == [1, 0, 0, 1] + [0] * 8  # one chunk without a hit, one with three
    assert counts.hits_per_chunk.total == 3
    loop.warm(C)
    deleted(loop, id_of(C))
    assert sum(counts.hits_per_chunk.counts) == 3
    assert (counts.num_evicted_chunks, counts.num_evicted_tokens) == (2, 8)


def test_refusals():
    loop = Loop(pool_size=40)
    loop.warm(A, B, C)
    arrival = loop.admission.arrival
    arrival.limits = arrival.limits._replace(context_len=20)

    def refused(*chunks, **options):
        return loop.submit([*chunks, QUESTION], "r", **options).to_finish is not None

    long = (CHUNK, tuple(range(15)))
    assert refused(long, long, long, link="copy")
    assert refused((CHUNK, tuple(range(16)) + (3, 2, 1)), link="base")
    arrival.limits = arrival.limits._replace(neutral_preamble=array("q"))
    assert refused(A, link="base")
    assert all(refused(*[A] * 9) for _ in range(2))
    assert not refused(A)
    assert pin(loop, A, B, C) == ([id_of(A), id_of(B)], [BUDGET])
    assert pin(loop, (CHUNK, (9,)))[1] == ["unknown"]  # there is nothing to pin, so no refusal is counted
    counted = {"pool": 1, "positions": 1, "policy": 1, "request": 2, "pin_budget": 1, "pin_room": 0}
    assert loop.store.counts.refused == counted


def test_a_pin_without_room_counts_as_refused():
    loop = Loop(pool_size=40, host_size=80)
    chunk = (CHUNK, (1, 2, 3, 4, 5))
    loop.warm(chunk)
    loop.tree_cache.evict(EvictParams(num_tokens=40))
    loop.submit([(TEXT, tuple(range(1, 15)) * 2), QUESTION], "r", max_new_tokens=9)
    for _ in range(8):
        loop.step()
    assert loop.pools.slots.available_size() < len(chunk[1])
    assert pin(loop, chunk)[1] == ["the device has no room for it now"]
    assert loop.store.counts.refused["pin_room"] == 1
    loop.run()


def test_batches():
    loop = Loop()
    loop.submit([(TEXT, (14,)), QUESTION], "plain", max_new_tokens=3)
    loop.run()
    assert loop.store.counts.batches == {
        ("prefill", False): 1,
        ("prefill", True): 0,
        ("decode", False): 2,
        ("decode", True): 0,
    }
    ask(loop, A, max_new_tokens=2)  # the fill and its parent share a batch
    assert loop.store.counts.batches["prefill", True] == 1
    assert loop.store.counts.batches["decode", True] == 1
    assert loop.store.counts.batches["prefill", False] == 1


@pytest.mark.parametrize("host_size", [0, 80])
def test_occupancy(host_size):
    loop = Loop(pool_size=40, host_size=host_size)
    loop.warm(A, B, C)
    assert occupancy(loop) == {
        "resident": (3, 12),
        "pinned": (0, 0),
        "locked": (0, 0),
        "evictable": (3, 12),
        "host": (0, 0),
    }
    pin(loop, A)
    pin(loop, B)
    loop.submit([B, C, QUESTION], "r", max_new_tokens=3)
    loop.step()
    users = {chunk["id"]: chunk["users"] for chunk in listed(loop)["chunks"]}
    assert sorted(users.values()) == [0, 1, 1]
    now = occupancy(loop)
    assert (now["resident"], now["pinned"], now["locked"], now["evictable"]) == ((3, 12), (2, 8), (2, 8), (0, 0))
    loop.run()
    loop.tree_cache.evict(EvictParams(num_tokens=40))
    now = occupancy(loop)
    assert now["resident"] == now["pinned"] == (2, 8) and now["evictable"] == (0, 0)
    assert now["host"] == ((1, 4) if host_size else (0, 0))


def test_histogram_bounds_are_inclusive():
    histogram = Histogram((0, 1, 2.5))
    for value in (0, 0, 0.5, 1, 2.5, 2.6, 100):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1, 2], pytest.approx(106.6))


@pytest.fixture
def registry(monkeypatch):
    """Where metrics are registered, and nowhere else."""
    registry = prometheus_client.CollectorRegistry()
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, name, partial(getattr(prometheus_client, name), registry=registry))
    return registry


def test_memory_of_states(registry):
    """Of chunks and of an answer, and of what a request reads."""
    loop = Loop(num_states=4)
    metrics = ChunkMetrics(loop.store, {"model_name": "m"})
    size = loop.store.states.pool.slot_bytes

    def used(*uses):
        metrics._due = 0
        metrics.publish()
        labels = [{"model_name": "m", "use": use} for use in uses]
        return [registry.get_sample_value("sglang_lazy:state_bytes", each) / size for each in labels]

    assert used("locked", "evictable", "free") == [0, 0, 4]
    ask(loop, A, B)
    assert used("locked", "evictable", "free") == [0, 3, 1]
    loop.submit([A, QUESTION], "running")
    loop.step()
    assert used("locked", "evictable", "free") == [1, 2, 1]
    loop.run()


@pytest.mark.parametrize(("seconds", "published"), [(0.5, [1, 1, 3, 3]), (1.5, [1, 2, 3, 4]), (60, [1, 2, 3, 4])])
def test_publishing_takes_little_of_this_threads_time(registry, seconds, published):
    """Between two looks at the clock so many seconds pass, in which others run. Each publication takes a
    millisecond."""
    loop, clock, cpu_clock = Loop(), itertools.count(100, seconds), itertools.count(0, 1 / TIME_SHARE)
    metrics = ChunkMetrics(loop.store, {"model_name": "m"}, lambda: next(clock), lambda: next(cpu_clock))
    seen = []
    for number in range(4):
        ask(loop, A, rid=f"r{number}")
        metrics.publish()
        seen.append(registry.get_sample_value("sglang_lazy:chunk_references_total", {"model_name": "m"}))
    assert seen == published

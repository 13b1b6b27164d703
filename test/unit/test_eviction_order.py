"""The order of eviction: what counts as a use under each policy, and that wall-clock time does not matter."""

import random
import sys
import time
import types

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.recorder import RecordingPools
from fakes.requests import CHUNK, TEXT, new_request
from fakes.scheduler import Scheduler
from sglang_lazy.core.state import linked

pytestmark = pytest.mark.usefixtures("sglang_context")

POLICIES = ("lru", "lfu", "slru", "fifo", "filo", "priority")
PLAIN = (TEXT, (7, 7, 7, 7))


def evicted(scheduler):
    """The tokens whose slots are freed from now on, in order, each with those before it that its KV depends on."""
    slots, order = scheduler.pools.slots, []
    whole = slots.full_attn_allocator if scheduler.pools.window else slots
    free = whole.free

    def record(freed):
        if whole.free_group is None:
            for slot in freed.tolist():
                kind, *_, path = whole.contents[slot]
                order.append(path[1] if kind == "chunk" else path)
        free(freed)

    whole.free = record
    return order


def evict_all(scheduler):
    while scheduler.tree_cache.evictable_size():
        scheduler.tree_cache.evict(EvictParams(num_tokens=1))


def node_of(scheduler, chunk):
    """The node of a chunk that has not been split."""
    (node,) = (child for child in scheduler.tree_cache.tree.root.children.values() if tuple(child.tokens) == chunk[1])
    return node


@pytest.mark.parametrize("policy, num_texts", [("lfu", 2), ("slru", 1)])
@pytest.mark.parametrize("link", ["block", "copy"])
def test_a_chunk_in_demand_outlives_idle_text(policy, num_texts, link):
    """A chunk used six times outlives text of prompts with chunks that was used later but less often. Prompts without
    chunks have their text in SGLang's own tree, which gives by age."""
    scheduler = Loop(200, eviction_policy=policy, link=link)
    for i in range(6):
        scheduler.submit([A, (TEXT, (i, i))], f"p{i}", max_new_tokens=1)
        scheduler.run()
    for i in range(num_texts):
        scheduler.submit([PLAIN, B, QUESTION], f"text{i}", max_new_tokens=1)
        scheduler.run()
    order = evicted(scheduler)
    evict_all(scheduler)
    assert order.index(PLAIN[1]) < order.index(A[1])


def test_chunks_take_the_priority_of_requests():
    """Chunks of a high-priority request outlive later ones, whoever computed them."""
    scheduler = Loop(200, eviction_policy="priority")
    scheduler.warm(A, D)
    for rid, chunk, priority in (("adopts", A, 5), ("computes", B, 5), ("unimportant", C, 1)):
        scheduler.submit([chunk, QUESTION], rid, priority=priority, max_new_tokens=1)
        scheduler.run()
    order = evicted(scheduler)
    evict_all(scheduler)
    chunks = [tokens for tokens in order if tokens in (A[1], B[1], C[1], D[1])]
    assert chunks == [D[1], C[1], A[1], B[1]]


def test_a_fill_has_the_priority_of_its_parent():
    """Even if the parent is aborted before it uses what the fill, in a batch of its own, has computed."""
    scheduler = Loop(chunked_prefill_size=len(A[1]))
    parent = scheduler.submit([A, QUESTION], "aborted", priority=5)
    scheduler.step()
    scheduler.abort(parent)
    scheduler.run()
    assert node_of(scheduler, A).priority == 5


def test_a_lookup_alone_is_no_hit():
    """A request that is aborted while it waits makes the chunks it found recent, but counts as no hit."""
    scheduler = Loop()
    scheduler.warm(A, B)
    node = node_of(scheduler, A)
    hits, recency = node.hits, node.last_use
    req = scheduler.submit([A, QUESTION], "aborted", priority=5)
    scheduler.visible()
    assert linked(req).ready
    scheduler.abort(req)
    scheduler.run()
    assert (node.hits, node.priority) == (hits, 0)
    assert node.last_use > max(recency, node_of(scheduler, B).last_use)


@pytest.mark.parametrize("chunked_prefill_size", [2, 64])
def test_a_prompt_uses_its_chunks_once(chunked_prefill_size):
    """In however many pieces it is prefilled."""
    scheduler = Loop(chunked_prefill_size=chunked_prefill_size)
    scheduler.warm(A)
    node = node_of(scheduler, A)
    hits = node.hits
    scheduler.submit([A, (TEXT, (5, 6, 7, 8, 9, 10, 11)), QUESTION], "p0", max_new_tokens=3)
    scheduler.run()
    assert len(scheduler.log) == {2: 4, 64: 1}[chunked_prefill_size] + 2
    assert node.hits == hits + 1


def history(scheduler, seed, chunks=True):
    """Requests with shared prefixes, in a pool that holds some of them; returns the order of eviction."""
    dice, order = random.Random(seed), evicted(scheduler)
    for i in range(40):
        parts = []
        for _ in range(dice.randint(1, 3)):
            tokens = tuple(dice.choice([(1, 2, 3, 4), (1, 2, 5), (6, 7), (6, 8, 9)])[: dice.randint(1, 4)])
            parts.append((CHUNK if chunks and dice.random() < 0.5 else TEXT, tokens))
        priority = dice.choice([0, 0, 1, 2])
        req = new_request(parts, rid=f"r{i}", max_new_tokens=dice.randint(1, 4), priority=priority)
        scheduler._add_request_to_queue(req)
        for _ in range(dice.randint(0, 2)):
            scheduler.step()
        if scheduler.waiting_queue and dice.random() < 0.3:
            scheduler.abort(dice.choice(scheduler.waiting_queue))
        if dice.random() < 0.3:  # a request that is matched but never runs
            tokens = dice.choice([(1, 2, 3, 4), (6, 7)])[: dice.randint(2, 4)]
            new_request([(TEXT, (*tokens, 15))]).init_next_round_input(scheduler.tree_cache)
    scheduler.run(500)
    evict_all(scheduler)
    return order


@pytest.fixture
def any_time(monkeypatch):
    """any_time(seed): from now on SGLang's caches and all of ours read random times from their clocks."""
    readers = [
        module
        for name, module in sys.modules.items()
        if name.startswith(("sglang.srt.mem_cache.", "sglang_lazy.")) and getattr(module, "time", None) is time
    ]
    assert {"sglang_lazy.chunks.store", "sglang_lazy.cache.room"} <= {module.__name__ for module in readers}

    def set_clock(seed):
        dice = random.Random(seed)
        names = ("monotonic", "perf_counter", "time")
        clock = types.SimpleNamespace(**dict.fromkeys(names, lambda: dice.uniform(0, 1000)))
        for module in readers:
            monkeypatch.setattr(module, "time", clock)

    return set_clock


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_wall_clock_time_does_not_matter(policy, seed, any_time):
    """Two ranks with the same history evict in the same order: chunks, text after them, plain text, and split
    nodes."""
    orders = []
    for clock in (1, 2):
        any_time(clock)
        orders.append(history(Loop(40, eviction_policy=policy), seed))
    assert orders[0] == orders[1]
    assert len(orders[0]) > 60


@pytest.mark.parametrize("seed", range(4))
def test_nor_where_a_lookup_finds_what_it_cannot_read(seed, any_time):
    """Tokens that have lost their window KV, and those after them."""
    orders = []
    for clock in (1, 2):
        any_time(clock)
        orders.append(history(Loop(40, window=2, window_size=30), seed))
    assert orders[0] == orders[1]
    assert len(orders[0]) > 30


class StockPools(RecordingPools):
    """With SGLang's own cache alone."""

    reuses = False


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_plain_text_is_evicted_in_sglangs_order(policy, seed):
    """Without chunks our cache evicts what SGLang's own would."""
    orders = []
    for kind in (StockPools, RecordingPools):
        pools = kind(40, eviction_policy=policy)
        orders.append(history(Scheduler(pools), seed, chunks=False))
    assert orders[0] == orders[1]
    assert len(orders[0]) > 40

"""The scheduler with a separate, small pool for sliding-window layers."""

import random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.requests import CHUNK, TEXT
from sglang_lazy.core.policy import Policy
from sglang_lazy.core.state import fill_of
from sglang_lazy.policies import POLICIES, register

pytestmark = pytest.mark.usefixtures("sglang_context")


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("link", ["block", "base+epic:tokens=2", "query:ratio=0.4", "base+static:ratio=0.4"])
@pytest.mark.parametrize("seed", range(2))
def test_no_deadlock_and_nothing_lost(seed, link, overlap):
    """Random requests and aborts in pools that barely hold the largest prompt: all that are not aborted finish."""
    dice = random.Random(seed)
    scheduler = Loop(
        90,
        chunked_prefill_size=dice.choice([3, 64]),
        overlap=overlap,
        link=link,
        max_fill_tokens=dice.choice([3, 9, 64]),
        window=2,
        window_size=50 if link.startswith("query") else 40,
    )
    reqs, aborted = [], set()
    for i in range(40):
        parts = [dice.choice([A, B, C, D, QUESTION, (CHUNK, (1, 2))]) for _ in range(dice.randint(1, 5))]
        own = {"cache_salt": dice.choice([None, None, "salt"]), "max_new_tokens": dice.randint(1, 12)}
        reqs.append(scheduler.submit(parts, f"r{i}", **own))
        assert reqs[-1].to_finish is None
        aborted |= scheduler.disturb(dice)
    scheduler.run(2000)
    for req in reqs:
        assert req in aborted or len(req.output_ids) == req.sampling_params.max_new_tokens
    scheduler.tree_cache.evict(EvictParams(num_tokens=90, swa_num_tokens=50))
    assert scheduler.pools.num_free == 90
    assert scheduler.pools.slots.swa_available_size() == scheduler.pools.slots.size_swa


def tokens(dice, count):
    return tuple(dice.randint(1, 13) for _ in range(count))


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize(
    "seed", [6, 20, 27, 56]
)  # in these, a request fills the pool, alone or beside another's prompt
def test_the_last_running_request_goes_on(seed, overlap):
    """Answers are expected to stay short, so that prompts begin which leave no window KV for them: what was accepted is
    answered."""
    dice = random.Random(seed)
    window, window_size = dice.choice([6, 8, 12]), dice.choice([36, 44])
    scheduler = Loop(
        dice.choice([120, 160]),
        chunked_prefill_size=dice.choice([5, 12, 20]),
        overlap=overlap,
        max_fill_tokens=16,
        window=window,
        window_size=window_size,
    )
    scheduler.new_token_ratio_tracker.current = 0.0
    reqs = []
    for i in range(12):
        chunks = [(CHUNK, tokens(dice, dice.choice([2, 9, 12]))) for _ in range(dice.randint(0, 2))]
        parts = [*chunks, (TEXT, tokens(dice, dice.choice([1, 8, 20])))]
        own = {} if chunks else {"link": "full"}
        reqs.append(scheduler.submit(parts, f"r{i}", max_new_tokens=dice.randint(1, 15), **own))
        if reqs[-1].to_finish is not None:
            scheduler.abort(reqs.pop())
        for _ in range(dice.randint(0, 3)):
            scheduler.step()
    scheduler.run(2000)
    assert all(len(req.output_ids) == req.sampling_params.max_new_tokens for req in reqs)


def test_a_fill_keeps_the_window_kv_of_the_chunk_that_it_continues():
    """Its parent may read all of it, under a policy that recomputes tokens at its beginning."""
    scheduler = Loop(100, chunked_prefill_size=3, link="middle-four", window=2, window_size=40)
    first, more = tuple(range(1, 9)), tuple(range(3, 9))
    scheduler.warm((CHUNK, first))
    req = scheduler.submit([(CHUNK, first + more), QUESTION], "r", max_new_tokens=1)
    scheduler.step()
    assert fill_of(scheduler.chunked_req) is not None
    scheduler.tree_cache.evict(EvictParams(num_tokens=0, swa_num_tokens=40))
    scheduler.run()
    assert len(req.output_ids) == 1


def test_parents_of_one_batch_share_the_window_pool():
    """Each would fit alone: the second waits for the first, whose chunk and text have claimed what is free."""
    for window_size, first in ((40, {"r0"}), (80, {"r0", "r1"})):
        scheduler = Loop(200, chunked_prefill_size=64, window=2, window_size=window_size)
        chunks = [(CHUNK, tuple(1 + (i + j * j) % 13 for j in range(20))) for i in range(2)]
        reqs = [scheduler.submit([chunk, QUESTION], f"r{i}", max_new_tokens=2) for i, chunk in enumerate(chunks)]
        scheduler.step()
        assert {"r0", "r1"} & set(scheduler.log[0]) == first
        assert scheduler.tree_cache.admission.holders == [], "who has to wait is not admitted"
        scheduler.run()
        assert [len(req.output_ids) for req in reqs] == [2, 2]


def test_chunks_keep_their_last_window():
    """More chunks than the window pool could hold in full: each keeps its last window and is a hit in any order."""
    scheduler = Loop(200, chunked_prefill_size=12, window=2, window_size=40)
    docs = [(CHUNK, tuple(1 + (i + j * j) % 13 for j in range(12))) for i in range(8)]
    scheduler.warm(*docs)
    assert sum(len(tokens) for _, tokens in docs) > 2 * scheduler.pools.slots.size_swa
    for first in range(8):
        req = scheduler.submit([docs[first], QUESTION, docs[(first + 3) % 8], QUESTION], f"r{first}", max_new_tokens=2)
        scheduler.run()
        assert scheduler.counts(req)[1:] == (24, 3)


def test_a_policy_that_needs_more_of_a_chunk_has_it_computed_again():
    """Tokens recomputed within a chunk look back on window KV that no earlier prompt needed, and so was not kept."""
    scheduler = Loop(200, chunked_prefill_size=12, window=2, window_size=40)
    scheduler.warm(*[(CHUNK, tuple(1 + (i + j * j) % 13 for j in range(12))) for i in range(8)])
    document = (CHUNK, tuple(1 + (j * j) % 13 for j in range(12)))
    whole = scheduler.submit([document, QUESTION], "whole", max_new_tokens=1)
    scheduler.run()
    parts = scheduler.submit([document, QUESTION], "parts", max_new_tokens=1, link="middle-four")
    scheduler.run()
    assert scheduler.counts(whole)[1:] == (12, 1) and scheduler.counts(parts)[1:] == (0, 0)
    again = scheduler.submit([document, (TEXT, (14,)), QUESTION], "again", max_new_tokens=1, link="middle-four")
    scheduler.run()
    assert scheduler.counts(again)[1:] == (8, 1)


@pytest.mark.parametrize("link", ["query:ratio=0.4", "static:ratio=0.4"])
def test_window_kv_around_tokens_to_be_chosen_is_reserved_on_arrival(link):
    """A policy that measures first may choose tokens at both ends of a chunk, and their text looks back on window KV of
    all of it: a request is refused on arrival or served."""
    chunks = [(CHUNK, tuple(1 + (i + j * j) % 13 for j in range(12))) for i in range(2)]
    answered = refused = 0
    for window_size in range(30, 60, 2):
        scheduler = Loop(100, link=link, max_fill_tokens=12, window=2, window_size=window_size)
        req = scheduler.submit([*chunks, QUESTION], "r", max_new_tokens=1)
        refused += req.to_finish is not None
        if req.to_finish is None:
            scheduler.run()
            answered += len(req.output_ids) == 1
    assert answered and refused and answered + refused == 15


@pytest.fixture(autouse=True)
def middle_four():
    """A policy that recomputes the middle four tokens of each chunk."""

    class MiddleFour(Policy):
        name = "middle-four"

        def kept(self, layout, input_ids):
            return [
                ((0, 4), (8, end - start)) if end - start > 8 else ((0, end - start),) for start, end in layout.chunks
            ]

    register(MiddleFour)
    yield
    del POLICIES[MiddleFour.name]

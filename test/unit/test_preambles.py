"""Chunks after a preamble: fills compute it before them unless it is cached, and no other request sees it."""

import types

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.requests import CHUNK, NEUTRAL_PREAMBLE, TEXT
from sglang_lazy.core.model import MAX_PREAMBLE_LEN
from sglang_lazy.core.state import fill_of, lazy_state, linked
from sglang_lazy.scheduler.preambles import neutral_preamble

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])

LEAD = (TEXT, (9, 8, 7))
LINKS = {"base": len(NEUTRAL_PREAMBLE), "base:preamble=lead": len(LEAD[1])}
both_preambles = pytest.mark.parametrize("link, preamble_len", LINKS.items())
BEHIND_NEUTRAL = (TEXT, NEUTRAL_PREAMBLE)


def run_fills(scheduler):
    """Run until idle; returns how many tokens each fill computed, in the order in which they began."""
    computed, launch = {}, scheduler.pools.launch

    def counting(batch):
        for req in batch.reqs:
            if fill_of(req) is not None:
                computed[req.rid] = computed.get(req.rid, 0) + req.extend_len
        launch(batch)

    scheduler.pools.launch = counting
    scheduler.run()
    scheduler.pools.launch = launch
    return list(computed.values())


@both_loops
@both_preambles
@pytest.mark.parametrize("chunked_prefill_size", [1, 3, 4, 5, 64])
def test_a_fill_begins_with_its_preamble(link, preamble_len, overlap, chunked_prefill_size):
    """Cut anywhere by chunked prefill, then followed by its chunks; every token is computed once."""
    scheduler = Loop(overlap=overlap, link=link, chunked_prefill_size=chunked_prefill_size, max_fill_tokens=64)
    req = scheduler.submit([LEAD, A, (TEXT, (6,)), B, QUESTION], "p0")
    assert run_fills(scheduler) == [preamble_len + len(A[1]) + len(B[1])]
    assert len(req.output_ids) == 3 and scheduler.counts(req)[1:] == (0, 0)
    again = scheduler.submit([LEAD, B, A, QUESTION], "p1")
    assert run_fills(scheduler) == [] and scheduler.counts(again)[1:] == (8, 0b11)


@both_loops
@both_preambles
def test_a_cached_preamble_is_reused(link, preamble_len, overlap):
    """In full or in part, from other fills or from prompts with chunks that begin with it. Those without chunks are in
    SGLang's own tree."""
    scheduler = Loop(overlap=overlap, link=link)
    ids = NEUTRAL_PREAMBLE if link == "base" else LEAD[1]
    scheduler.submit([(TEXT, (*ids[:-1], 1, 1)), D, QUESTION], "a part of it", link="block", max_new_tokens=1)
    scheduler.run()
    scheduler.submit([LEAD, A, QUESTION], "p0")
    assert run_fills(scheduler) == [1 + len(A[1])], "the preamble's last token was not cached"
    scheduler.submit([LEAD, B, QUESTION], "p1")
    assert run_fills(scheduler) == [len(B[1])]
    scheduler.submit([LEAD, C, QUESTION], "p2", extra_key="tenant")
    assert run_fills(scheduler) == [preamble_len + len(C[1])], "each tenant's preamble is its own"
    begins_alike = scheduler.submit([(TEXT, (*ids, 1)), D, QUESTION], "p3", link="block", max_new_tokens=1)
    plain = scheduler.submit([(TEXT, (*ids, 1))], "plain", max_new_tokens=1)
    scheduler.run()
    assert scheduler.counts(begins_alike) == (preamble_len + 4, 4, 1) and plain.cached_tokens == 0


@both_loops
@both_preambles
def test_fills_that_share_a_preamble(link, preamble_len, overlap):
    """Side by side, each computes it, since fills do not wait for one another, and one copy remains, as the check of
    slots proves. One after the other, the second finds it."""
    for chunked_prefill_size, computed in ((64, preamble_len), (preamble_len + 4, 0)):
        scheduler = Loop(
            overlap=overlap, link=link, chunked_prefill_size=chunked_prefill_size, max_fill_tokens=preamble_len + 7
        )
        scheduler.submit([LEAD, A, B, C, QUESTION], "p0")
        first, *others = run_fills(scheduler)
        assert first == preamble_len + 4 and others == [computed + 4] * 2


@both_loops
@both_preambles
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
def test_a_preamble_evicted_in_between(link, preamble_len, overlap, chunked_prefill_size):
    """Resident chunks after it stay valid; for a new chunk it is computed again."""
    scheduler = Loop(overlap=overlap, link=link, chunked_prefill_size=chunked_prefill_size, max_fill_tokens=64)
    scheduler.submit([LEAD, A, QUESTION], "p0")
    scheduler.run()
    req = scheduler.submit([LEAD, B, A, QUESTION], "p1")
    cache, node = scheduler.tree_cache, scheduler.store.find(linked(req).prompt.chunks[1])
    cache.tree.lock(node)
    cache.evict(EvictParams(num_tokens=100))
    cache.tree.unlock(node)
    assert run_fills(scheduler) == [preamble_len + 4] and scheduler.counts(req)[1:] == (4, 0b10)


@both_loops
@both_preambles
@pytest.mark.parametrize("chunked_prefill_size", [2, 64])
def test_a_chunk_whose_beginning_is_cached(link, preamble_len, overlap, chunked_prefill_size):
    """After the same preamble only the rest is computed; after another preamble it is another chunk."""
    scheduler = Loop(overlap=overlap, link=link, chunked_prefill_size=chunked_prefill_size, max_fill_tokens=64)
    scheduler.submit([LEAD, (CHUNK, A[1][:3]), QUESTION], "p0")
    scheduler.run()
    longer = scheduler.submit([LEAD, B, A, C, QUESTION], "p1")
    assert run_fills(scheduler) == [4 + 1 + 4]
    for other, computed in {"block": 4, "base": len(NEUTRAL_PREAMBLE) + 4, "base:preamble=lead": 4}.items():
        if other != link:  # the lead is cached, as text
            req = scheduler.submit([LEAD, A, QUESTION], other, link=other)
            assert run_fills(scheduler) == [computed] and scheduler.counts(req)[1:] == (0, 0)
    assert len(longer.output_ids) == 3


@both_loops
@both_preambles
@pytest.mark.parametrize("chunked_prefill_size", [2, 64])
def test_a_cached_chunk_prefix_behind_an_evicted_preamble(link, preamble_len, overlap, chunked_prefill_size):
    """The fill's row is then ordered differently from its tokens, although it has a single chunk."""
    scheduler = Loop(overlap=overlap, link=link, chunked_prefill_size=chunked_prefill_size, max_fill_tokens=64)
    beginning = scheduler.submit([LEAD, (CHUNK, A[1][:2]), QUESTION], "p0")
    scheduler.run()
    cache, node = scheduler.tree_cache, scheduler.store.find(linked(beginning).prompt.chunks[0])
    cache.tree.lock(node)
    cache.evict(EvictParams(num_tokens=100))
    cache.tree.unlock(node)
    req = scheduler.submit([LEAD, A, QUESTION], "p1")
    assert run_fills(scheduler) == [preamble_len + 2]
    assert len(req.output_ids) == 3 and scheduler.counts(req)[1:] == (0, 0)


@both_preambles
def test_a_preamble_counts_as_needed_memory(link, preamble_len):
    """A parent that would fit without it waits, and so does what is behind that parent."""
    for left, admitted in ((preamble_len - 1, 1), (preamble_len, 2)):
        scheduler = Loop(100, link=link)
        first_need = (3 + 1 + 30 + 1) + (preamble_len + 4 + 1)
        second_need = (3 + 1 + 1 + 1) + (4 + 1)
        scheduler.pools.slots.alloc(100 - first_need - second_need - left)
        scheduler.submit([LEAD, A, QUESTION], "p0", max_new_tokens=30)
        scheduler.submit([LEAD, B, QUESTION], "p1", max_new_tokens=1)
        scheduler.visible()
        assert len(scheduler.admission.holders) == admitted


@both_loops
def test_leads_separate_chunks(overlap):
    """Chunks after different leads differ; without a lead they are those of `block`; after a lead equal to the
    neutral preamble they are those of `base`."""
    scheduler = Loop(overlap=overlap, link="base:preamble=lead")
    scheduler.submit([LEAD, A, QUESTION], "p0")
    assert run_fills(scheduler) == [3 + 4]
    for lead, link, computed in [
        ([(TEXT, LEAD[1][:2])], "base:preamble=lead", [4]),  # the lead is cached
        ([], "base:preamble=lead", [4]),
        ([LEAD], "block", []),
        ([BEHIND_NEUTRAL], "base:preamble=lead", [2 + 4]),
        ([LEAD], "base", []),
        ([LEAD], "base:preamble=lead", []),
    ]:
        scheduler.submit([*lead, A, QUESTION], "p", link=link)
        assert run_fills(scheduler) == computed


@both_loops
@pytest.mark.parametrize("link", ["base", "base+query:ratio=0.4"])
def test_aborts_and_eviction_leak_nothing(link, overlap):
    """At every step of a fill with a preamble, between its pieces too."""
    for when in range(9):
        for chunked in (False, True):
            scheduler = Loop(40, overlap=overlap, link=link, chunked_prefill_size=2, max_fill_tokens=64)
            parent = scheduler.submit([LEAD, A, B, QUESTION], "p0")
            other = scheduler.submit([B, QUESTION], "p1")
            for _ in range(when):
                scheduler.step()
            if chunked and scheduler.chunked_req is not None:
                aborted = scheduler.abort_chunked()
            elif parent in scheduler.waiting_queue:
                scheduler.abort(parent)
                aborted = parent
            scheduler.run()
            assert all(len(req.output_ids) == 3 for req in (parent, other) if req is not aborted)
            scheduler.tree_cache.evict(EvictParams(num_tokens=40))
            assert scheduler.pools.slots.available_size() == 40


@both_loops
@pytest.mark.parametrize("policy", ["", "+epic:tokens=1", "+query:ratio=0.4", "+blend:ratio=0.4"])
@pytest.mark.parametrize("chunked_prefill_size", [1, 3, 7, 64])
def test_a_lead_computed_by_the_prompts_own_fills_is_no_hit(chunked_prefill_size, policy, overlap):
    """It is cached when the prompt runs, a batch later, but only what was cached before the request counts as
    cached."""
    scheduler = Loop(
        overlap=overlap,
        link=f"base:preamble=lead{policy}",
        chunked_prefill_size=chunked_prefill_size,
        max_fill_tokens=64,
    )
    scheduler.submit([(TEXT, (*LEAD[1][:2], 1, 1)), C, QUESTION], "begins alike", link="block", max_new_tokens=1)
    scheduler.run()
    cold = scheduler.submit([LEAD, A, QUESTION], "p0")
    scheduler.run()
    assert scheduler.counts(cold) == (2, 0, 0)
    lead_is_there = scheduler.submit([LEAD, B, QUESTION], "p1")
    scheduler.run()
    assert scheduler.counts(lead_is_there) == (3, 0, 0)


# What is refused


@pytest.mark.parametrize("lead_len, refused", [(4, False), (5, True)])
def test_a_chunk_that_exceeds_the_context_behind_its_preamble(lead_len, refused):
    """These tests' model has 64 positions; longer prompts are SGLang's to refuse."""
    chunk = (CHUNK, tuple(i % 15 for i in range(60)))
    scheduler = Loop(200)
    req = scheduler.submit([(TEXT, (1,) * lead_len), chunk], "p0", link="base:preamble=lead", max_new_tokens=1)
    assert (req.to_finish is not None) == refused
    if refused:
        assert "a chunk of 60 tokens after a preamble of 5 exceeds the model's 64 positions" in req.to_finish.message
        assert lazy_state(req) is None
    neutral = scheduler.submit([(CHUNK, (*chunk[1], 1, 2, 3)), QUESTION], "p1", link="base", max_new_tokens=1)
    assert "a chunk of 63 tokens after a preamble of 2 exceeds" in neutral.to_finish.message


def test_a_prompt_that_does_not_fit_beside_its_preamble():
    for pool_size, refused in ((2 + 4 + 1, True), (2 + 4 + 1 + 1, False)):
        req = Loop(pool_size).submit([A, QUESTION], "p0", link="base", max_new_tokens=1)
        assert (req.to_finish is not None) == refused
        assert not refused or "1 tokens of text, 6 of chunks" in req.to_finish.message


@pytest.mark.parametrize("link", ["base", "base+epic:tokens=2", "base+query:ratio=0.4"])
def test_a_server_without_a_neutral_preamble(link):
    """It has no tokenizer, or an empty text: policies that need the preamble are refused; a lead does not need it."""
    scheduler = Loop()
    arrival = scheduler.admission.arrival
    for preamble in (neutral_preamble("Some text.", None), neutral_preamble("", types.SimpleNamespace(encode=list))):
        arrival.limits = arrival.limits._replace(neutral_preamble=preamble)
        req = scheduler.submit([LEAD, A, QUESTION], "refused", link=link)
        assert f"link {req.layout.link!r}: this server has no preamble" in req.to_finish.message
        assert scheduler.submit([LEAD, A, QUESTION], "lead", link="base:preamble=lead").to_finish is None


def test_a_preamble_that_is_too_long_for_any_server():
    tokenizer = types.SimpleNamespace(encode=lambda text: [ord(letter) for letter in text])
    assert list(neutral_preamble("ab", tokenizer)) == [97, 98]
    assert len(neutral_preamble("a" * MAX_PREAMBLE_LEN, tokenizer)) == MAX_PREAMBLE_LEN
    with pytest.raises(ValueError, match=f"--lazy-preamble has {MAX_PREAMBLE_LEN + 1} tokens"):
        neutral_preamble("a" * (MAX_PREAMBLE_LEN + 1), tokenizer)

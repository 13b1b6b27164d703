"""What results report about reused chunks, and what counts as a use."""

import dataclasses

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, Loop
from fakes.requests import CHUNK, TEXT
from sglang_lazy.core.state import linked, unused_hits
from sglang_lazy.port.scheduler import upkeep
from sglang_lazy.scheduler.reuse import hits_by_chunk

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


@both_loops
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
def test_counts_are_honest(overlap, chunked_prefill_size):
    """A cold prompt reports no hits, though its chunks were filled just before it ran; a warm one reports what was
    cached."""
    scheduler = Loop(overlap=overlap, chunked_prefill_size=chunked_prefill_size)
    cold = scheduler.submit([A, (TEXT, (14,)), B, A, QUESTION], "cold", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(cold) == (0, 0, 0b000)
    partly = scheduler.submit([C, QUESTION, A, B, QUESTION], "partly", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(partly) == (8, 8, 0b110)
    again = scheduler.submit([C, QUESTION, A, B, QUESTION, QUESTION], "again", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(again) == (12 + 2, 12, 0b111), "its first two text tokens are cached too"
    ends_in_chunk = scheduler.submit([QUESTION, B], "chunk last", max_new_tokens=2)
    scheduler.run()
    assert scheduler.counts(ends_in_chunk) == (3, 3, 0b1)


def test_counts_after_eviction_before_admission():
    """A chunk that was resident on arrival but had to be computed again is not a hit."""
    scheduler = Loop()
    scheduler.warm(A, B)
    req = scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1)
    assert req.lazy.hit_mask == 0b11
    holder = scheduler.store.find(req.lazy.prompt.chunks[1])
    scheduler.tree_cache.tree.lock(holder)
    scheduler.tree_cache.evict(EvictParams(num_tokens=100))
    scheduler.tree_cache.tree.unlock(holder)
    scheduler.run()
    assert scheduler.counts(req) == (4, 4, 0b10)


def test_an_arrival_counts_as_a_use():
    """The chunk that was asked for last is evicted last, though it was computed first and another looked up since."""
    scheduler = Loop()
    scheduler.warm(A, B)
    cache = scheduler.tree_cache
    (b,) = scheduler.submit([B, QUESTION], "p0", max_new_tokens=1).lazy.prompt.chunks
    (a,) = scheduler.submit([A, QUESTION], "p1", max_new_tokens=1).lazy.prompt.chunks
    assert cache.store.find(b)
    while cache.tree.num_evictable > len(A[1]):
        cache.evict(EvictParams(num_tokens=1))
    assert cache.store.find(a) and not cache.store.find(b)


def test_a_chunk_at_the_end_needs_all_but_its_last_token():
    """A prompt's last token is computed as text, so a chunk at its end needs all tokens but the last."""
    scheduler = Loop()
    scheduler.warm((CHUNK, A[1][:3]))
    req = scheduler.submit([A], "p0", max_new_tokens=1)
    assert req.lazy.hit_mask == 0b1
    scheduler.run()
    assert scheduler.counts(req) == (3, 3, 0b1)


def test_split_before_admission():
    """A chunk whose node is split after its request arrived still ends at the node that was found."""
    scheduler = Loop()
    scheduler.warm(A, B)
    req = scheduler.submit([B, A, QUESTION], "p0", max_new_tokens=1)
    found = list(req.lazy.found)
    beginning = dataclasses.replace(req.lazy.prompt.chunks[1], kept=((0, 2),))
    assert scheduler.store.find(beginning) is found[1].parent, "the chunk's beginning is a node of its own now"
    scheduler.run()
    assert scheduler.counts(req) == (8, 8, 0b11)


def test_chunk_that_another_request_fills_is_no_hit():
    """Counts tell what was resident on arrival; a chunk still being computed was not."""
    scheduler = Loop(chunked_prefill_size=2)
    scheduler.submit([A, QUESTION], "p0", max_new_tokens=1)
    scheduler.step()
    late = scheduler.submit([A, QUESTION, QUESTION], "p1", max_new_tokens=1)
    scheduler.run()
    assert late.lazy.hit_mask == 0
    assert scheduler.counts(late)[1] == 0


LINKS = ["epic:tokens=3", "epic:tokens=4", "query:ratio=0.5", "query:ratio=1.0", "blend:ratio=0.9", "static:ratio=0.6"]


@both_loops
@pytest.mark.parametrize("link", [*LINKS, "block", "copy"])
def test_a_cached_chunk_is_a_hit_whatever_the_policy_keeps_of_it(link, overlap):
    """Even if that is nothing of any chunk, so that the request is an ordinary one; reused tokens are told apart."""
    scheduler = Loop(200, overlap=overlap)
    scheduler.warm(A, B)
    counts = scheduler.store.counts
    before = (counts.num_references, counts.num_hits, counts.num_reused_tokens)
    req = scheduler.submit([QUESTION, A, QUESTION, B, C, QUESTION], "r", link=link, max_new_tokens=2)
    scheduler.run()
    _, options = upkeep.report_reuse(None, get_cached_tokens_details=lambda req: None)
    details = options["get_cached_tokens_details"](req)
    assert int(details["chunk_hits"], 16) == 0b011
    kept = {} if req.lazy is None else {chunk.index: chunk.num_kept for chunk in req.lazy.prompt.chunks}
    parts = dict(map(int, part.split(":")) for part in details["chunk_parts"].split(",") if part)
    assert [parts.get(i, 4) for i in range(2)] == [kept.get(i, 0) for i in range(2)]
    assert details["chunk"] == sum(kept.get(i, 0) for i in range(2))
    after = (counts.num_references, counts.num_hits, counts.num_reused_tokens)
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 2, details["chunk"]]


@both_loops
@pytest.mark.parametrize("link", LINKS)
def test_chunks_that_a_prompt_had_computed_are_no_hits(link, overlap):
    """Though its probe has them computed before its policy keeps nothing of some; another tenant's are none either."""
    scheduler = Loop(200, overlap=overlap)
    scheduler.submit([QUESTION, A, B, QUESTION], "other", max_new_tokens=1, cache_salt="other")
    scheduler.run()
    req = scheduler.submit([QUESTION, A, QUESTION, B, QUESTION], "r", link=link, max_new_tokens=1)
    scheduler.run()
    assert hits_by_chunk(linked(req), unused_hits(req), is_finished=True)["chunk_hits"] == "0"

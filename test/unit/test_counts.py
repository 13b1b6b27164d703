"""What results report about reused chunks, and what counts as a use."""

import dataclasses

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.loop import QUESTION, A, B, C, Loop
from fakes.requests import CHUNK, TEXT

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
    scheduler.tree_cache.inc_lock_ref(holder)
    scheduler.tree_cache.evict(EvictParams(num_tokens=100))
    scheduler.tree_cache.dec_lock_ref(holder)
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
    while len(cache.evictable_leaves) > 1:
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

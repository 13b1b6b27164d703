"""Scheduling where few chunks can have states of recurrent layers: who waits, who is refused; and nothing hangs."""

import random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_chunk_lists import listed
from test_pins import pin

from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.requests import CHUNK, TEXT
from fakes.storage import Storage
from sglang_lazy.cache.states import TEXT_SHARE
from sglang_lazy.chunks.store import ChunkState

pytestmark = pytest.mark.usefixtures("sglang_context")


def states(loop: Loop):
    return loop.store.states


def lost(loop: Loop) -> int:
    held = states(loop)
    return held.pool.size - held.pool.available_size() - held.num_evictable - held.num_locked


def test_a_parent_runs_after_its_chunks():
    """Not in the same pass, whose layers would need states that it computes."""
    loop = Loop(num_states=4)
    loop.submit([A, B, QUESTION], "p0", max_new_tokens=1)
    loop.run()
    assert loop.log == [["\0fill-0"], ["p0"]]
    assert lost(loop) == 0 and states(loop).num_evictable == 3, "of two chunks and an answer"
    slot_bytes = states(loop).pool.slot_bytes
    assert [chunk["state_bytes"] for chunk in listed(loop)["chunks"]] == [slot_bytes] * 2


def test_more_chunks_than_states():
    """One prompt is refused; two that would need more together run in turn, and evict each other's."""
    loop = Loop(num_states=3)
    refused = loop.submit([A, B, C, D, QUESTION], "p0", max_new_tokens=1)
    assert "--lazy-state-share" in refused.to_finish.message
    loop.abort(refused)
    parents = [loop.submit([A, B, QUESTION], "p1"), loop.submit([C, D, QUESTION], "p2")]
    loop.run()
    assert [len(parent.output_ids) for parent in parents] == [3, 3]
    assert [rid for batch in loop.log for rid in batch if rid.startswith("p")][:1] == ["p1"]
    again = loop.submit([A, QUESTION], "p3", max_new_tokens=1)
    assert loop.resident(again) == [False]
    loop.run()
    assert lost(loop) == 0


def test_preambles_take_states():
    """One for each fill, which may have a single chunk."""
    refused = Loop(num_states=3)
    assert "--lazy-state-share" in refused.submit([A, B, QUESTION], "p0", link="base").to_finish.message
    loop = Loop(num_states=4)
    parents = [loop.submit([*chunks, QUESTION], str(chunks), link="base") for chunks in ([A, B], [C, D], [A, C])]
    loop.run()
    assert [len(parent.output_ids) for parent in parents] == [3, 3, 3]
    assert lost(loop) == 0


def test_a_chunk_without_its_state_is_missing():
    loop = Loop(num_states=3)
    loop.warm(A)
    held = states(loop)
    held.pool.free(held.allocate(3))
    assert loop.resident(loop.submit([A, QUESTION], "p0", max_new_tokens=1)) == [False]
    loop.run()


def test_a_second_turn_begins_at_a_state():
    """Its text is no hit from there on, and none at all without a state."""
    loop = Loop(num_states=16)
    first = loop.submit([(TEXT, (3, 4)), A, (TEXT, (5, 6))], "p0", max_new_tokens=2)
    loop.run()
    answer = (TEXT, (5, 6, *first.output_ids))
    second = loop.submit([(TEXT, (3, 4)), A, answer, B, QUESTION], "p1", max_new_tokens=1)
    other = loop.submit([(TEXT, (3, 4)), A, (TEXT, (5, 6, 7, 7, 7)), QUESTION], "p2", max_new_tokens=1)
    loop.run()
    assert second.cached_tokens == 2 + 4 + 3, "the last token of an answer has no KV"
    assert other.cached_tokens == 2 + 4, "the text before the chunk has a state, too"
    held = states(loop)
    held.pool.free(held.allocate(16))
    third = loop.submit([(TEXT, (3, 4)), A, answer, B, QUESTION], "p3", max_new_tokens=1)
    loop.run()
    assert third.cached_tokens == 0


def test_text_before_chunks_is_shared():
    """With its state, once a pass has computed it. One of a batch keeps it, and no pass that computes only a part."""
    loop = Loop(num_states=16, chunked_prefill_size=16)
    loop.warm(A, B)
    system, other = (TEXT, (3, 4, 5)), (TEXT, (7, 7))
    first = [loop.submit([system, chunk, QUESTION], f"p{i}", max_new_tokens=4) for i, chunk in enumerate([A, B])]
    loop.step()
    assert states(loop).num_locked == 3, "of two chunks, and one text"
    second = loop.submit([system, B, A, QUESTION], "p2", max_new_tokens=1)
    third = loop.submit([other, system, A, QUESTION], "p3", max_new_tokens=1)
    loop.run()
    assert [req.cached_tokens for req in first] == [4, 4]
    assert (second.cached_tokens, third.cached_tokens) == (3 + 8, 4)
    long = [loop.submit([(TEXT, (5,) * 20), A, QUESTION], f"p{i}", max_new_tokens=1) for i in (4, 5)]
    loop.run()
    assert [req.cached_tokens for req in long] == [4, 4]
    assert lost(loop) == 0 and states(loop).num_locked == 0


def test_texts_that_begin_alike_are_shared_later():
    """The slots of their common beginning are those of the pass that is about to run, until the request ends."""
    loop = Loop(num_states=16)
    loop.warm(A)
    cached = []
    for i, last in enumerate([5, 9, 9, 9]):
        request = loop.submit([(TEXT, (3, 4, last)), A, QUESTION], f"p{i}", max_new_tokens=1)
        while not request.finished():
            free = loop.store.device.available_size()
            loop.step()
            assert loop.store.device.available_size() <= free or request.finished(), "a running pass writes to it"
        loop.run()
        cached.append(request.cached_tokens)
    assert cached == [4, 4, 4, 3 + 4]
    assert lost(loop) == 0 and states(loop).num_locked == 0


def test_text_before_chunks_leaves_states_to_chunks():
    """Those that fills still need, and most of a pool."""
    loop = Loop(num_states=8)
    loop.warm(A)
    for i in range(6):
        loop.submit([(TEXT, (i + 3, 9)), A, QUESTION], f"p{i}", max_new_tokens=4)
    loop.step()
    assert states(loop).num_locked == 1 + 8 // TEXT_SHARE
    loop.run()
    assert lost(loop) == 0 and states(loop).num_locked == 0


def test_pins_on_all_states_end():
    """They hold no memory that SGLang counts; a prompt that needs a state would wait without end, and all behind it."""
    loop = Loop(num_states=2)
    loop.admission.pins.budget, loop.admission.pins.max_states = 100, 2
    for chunk in (A, B):
        loop.submit([chunk, QUESTION], f"ahead of {chunk}", max_new_tokens=1, ahead=True)
    loop.run()
    assert len(pin(loop, A, B)[0]) == states(loop).num_locked == 2
    parent = loop.submit([C, QUESTION], "p0", max_new_tokens=1)
    plain = loop.submit([QUESTION], "p1", max_new_tokens=1)
    loop.run()
    assert len(parent.output_ids) == len(plain.output_ids) == 1
    assert lost(loop) == 0


def test_pins_have_a_share_of_the_states():
    """However few tokens they pin."""
    loop = Loop(num_states=4)
    loop.admission.pins.budget = 100
    loop.warm(A, B)
    assert len(pin(loop, A)[0]) == 1
    (reason,) = pin(loop, B)[1]
    assert "100 tokens or 1 states" in reason
    assert states(loop).num_locked == 1


def test_a_second_turn_runs_beside_fills_that_want_its_state():
    """Its text has a state, which can be evicted until it is matched: fills of the same batch must not count on it."""
    loop = Loop(num_states=3)
    first = loop.submit([A, (TEXT, (5, 6))], "p0", max_new_tokens=2)
    loop.run()
    assert states(loop).num_texts == 1
    answer = (TEXT, (5, 6, *first.output_ids))
    second = loop.submit([A, answer, QUESTION], "p1", max_new_tokens=1)
    other = loop.submit([B, C, QUESTION], "p2", max_new_tokens=1)
    loop.run()
    assert len(second.output_ids) == len(other.output_ids) == 1
    assert lost(loop) == 0


def test_a_parent_claims_the_states_of_all_chunks_of_a_fill():
    """Also those that only another parent wants, which comes later in the queue by now: its fill reserves them."""
    loop = Loop(num_states=4)
    loop.warm(D)
    first = loop.submit([D, A, B, QUESTION], "p0", max_new_tokens=1)
    states(loop).pool.free(states(loop).allocate(1))  # that of an answer
    assert loop.visible(), "the first is admitted, and its fill does not run yet"
    second = loop.submit([A, C, (CHUNK, (2, 2)), QUESTION], "p1", max_new_tokens=1)
    loop.waiting_queue.reverse()
    loop.run()
    assert len(first.output_ids) == len(second.output_ids) == 1
    assert lost(loop) == 0


@pytest.mark.parametrize(("num_states", "num_admitted"), [(3, 2), (2, 1)])
def test_a_parent_that_shares_a_fill_waits_for_the_states_of_all_its_chunks(num_states, num_admitted):
    """Its own missing chunks would fit, but one of the fill is wanted by a parent that comes later by now."""
    loop = Loop(num_states=num_states)
    first = loop.submit([A, B, QUESTION], "p0", max_new_tokens=1)
    assert loop.visible(), "the first is admitted, and its fill does not run yet"
    second = loop.submit([A, C, QUESTION], "p1", max_new_tokens=1)
    loop.waiting_queue.reverse()
    loop.visible()
    assert loop.admission.holders == [first, second][:num_admitted]
    loop.run()
    assert lost(loop) == 0


def test_a_batch_takes_only_so_many_pieces():
    """Fills are cut, and requests wait; one that alone has too many is refused."""
    loop = Loop(num_states=8, max_pieces=2)
    words = [(TEXT, (number,)) for number in (3, 4, 5)]
    refused = loop.submit([words[0], A, words[1], B, words[2]], "p0", max_new_tokens=1)
    assert "3 pieces of text" in refused.to_finish.message
    loop.abort(refused)
    loop.submit([A, B, C, D, words[0]], "p1", max_new_tokens=1)
    loop.submit([words[0], A, words[1]], "p2", max_new_tokens=1)
    loop.submit([A, words[0]], "p3", max_new_tokens=1)
    plain = [loop.submit([words[0]], f"p{i}", max_new_tokens=1) for i in range(4, 7)]
    loop.run()
    assert loop.log == [["\0fill-0"], ["\0fill-1"], ["p1"], ["p2"], ["p3", "p4"], ["p5", "p6"]]
    assert all(len(req.output_ids) == 1 for req in plain)


def test_the_host_keeps_states():
    """Beside the KV, as many for it as the device has; they come back with it, and no chunk without its own."""
    loop = Loop(24, num_states=3, host_size=16)
    assert loop.tree_cache.tiers.host.states.memory.slots.size == 2
    loop.warm(A, B, C)
    held = states(loop)
    held.pool.free(held.allocate(3))
    again = loop.submit([C, B, QUESTION], "p0", max_new_tokens=1)
    assert loop.states(again) == [ChunkState.HOST] * 2
    loop.run()
    assert loop.log == [["p0"]], "nothing is computed"
    assert loop.states(loop.submit([A, QUESTION], "p1", max_new_tokens=1)) == [ChunkState.MISSING]
    loop.run()
    assert lost(loop) == 0 and held.num_locked == 0


def test_a_chunk_that_begins_another_gets_its_state_on_the_host_later():
    """Its KV is there already."""
    loop = Loop(num_states=4, host_size=100)
    loop.warm((CHUNK, (*A[1], 9)), A)
    held = states(loop)
    held.pool.free(held.allocate(4))
    both = loop.submit([A, (CHUNK, (*A[1], 9)), QUESTION], "p0", max_new_tokens=1)
    assert loop.states(both) == [ChunkState.HOST] * 2
    loop.run()
    assert loop.log == [["p0"]]


@pytest.mark.parametrize("has_storage", [False, True], ids=["host", "storage"])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_hangs_or_is_lost_with_tiers(seed, has_storage):
    dice = random.Random(seed)
    num_states = dice.randint(2, 4)
    tiers = {"host_size": dice.choice([20, 40, 80]), "storage": Storage() if has_storage else None}
    loop = Loop(dice.choice([40, 60]), num_states=num_states, num_rows=6, **tiers)
    for i in range(40):
        parts = [
            dice.choice([A, B, C, D, (CHUNK, A[1][:2]), (CHUNK, (*A[1], 9))])
            for _ in range(dice.randint(1, num_states))
        ]
        loop.submit([*parts, (TEXT, (dice.randint(1, 15),))], f"p{i}", max_new_tokens=dice.randint(1, 4))
        loop.disturb(dice)
    loop.run(2000)
    assert lost(loop) == 0 and states(loop).num_locked == 0
    host, storage = loop.tree_cache.tiers.host, loop.tree_cache.tiers.storage
    if has_storage:
        assert not storage.fetches and (storage.report.num_fetched > 0) == (host.states.memory.slots.size > 1)
    nodes, with_states = [loop.store.tree.root], 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        with_states += node.host is not None and node.host.state is not None
    slots = host.states.memory.slots
    assert slots.size - slots.num_free == with_states > 0


def test_a_preamble_is_a_piece_of_its_fill():
    """So a fill of as many chunks as a pass has pieces would never run."""
    loop = Loop(num_states=4, max_pieces=2, link="base:preamble=lead")
    parents = [loop.submit([(TEXT, (3, 4)), *chunks, QUESTION], f"p{i}") for i, chunks in enumerate([(A, B), (C, D)])]
    loop.run()
    assert [len(parent.output_ids) for parent in parents] == [3, 3]
    assert [len(batch) for batch in loop.log if batch[0].startswith("\0")] == [1] * 4
    assert lost(loop) == 0


def test_chunks_computed_ahead_leave_no_answer():
    loop = Loop(num_states=3)
    loop.submit([A, QUESTION], "p0", max_new_tokens=1, ahead=True)
    loop.run()
    assert (states(loop).num_evictable, states(loop).pool.available_size()) == (1, 2)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_hangs_or_is_lost(seed):
    """Prompts of up to as many chunks as there are states, aborted at times, in pools that hold few, cut into parts."""
    dice = random.Random(seed)
    num_states = dice.randint(2, 4)
    loop = Loop(dice.choice([40, 60]), num_states=num_states, chunked_prefill_size=dice.choice([3, 7, 64]), num_rows=6)
    for i in range(40):
        parts, link = [], dice.choice(["block", "block", "base", "base:preamble=lead"])
        for _ in range(dice.randint(1, num_states if link == "block" else num_states // 2)):  # preambles take as many
            parts += [(TEXT, (14,))] if dice.random() < 0.4 else []
            parts.append(dice.choice([A, B, C, D, (CHUNK, A[1][:2]), (CHUNK, (*A[1], 9))]))
        parts.append((TEXT, (dice.randint(1, 15),)))
        loop.submit(parts, f"p{i}", max_new_tokens=dice.randint(1, 4), link=link)
        loop.disturb(dice)
        assert states(loop).num_locked <= num_states
    loop.run(2000)
    assert lost(loop) == 0 and states(loop).num_locked == 0


def test_the_head_of_the_queue_keeps_its_locks():
    """An urgent prompt that fits but for one token, by SGLang's count, behind one that holds a chunk and does not run:
    that one makes room, though it was admitted earlier."""
    loop = Loop(30, num_states=4, scheduler={"prioritizes": True})
    loop.warm(B)
    waits = loop.submit([A, QUESTION], "waits", max_new_tokens=1, priority=0)
    loop.step()
    assert loop.log == [["\0fill-1"]], "it runs after its chunk"
    urgent = loop.submit([B, (TEXT, (7,) * 12)], "urgent", max_new_tokens=9, priority=9)
    loop.run()
    assert [rid for (rid,) in loop.log[1:]] == ["urgent"] * 9 + ["waits"]
    assert len(urgent.output_ids) == 9 and len(waits.output_ids) == 1


@pytest.mark.parametrize(("max_pieces", "is_refused"), [(2, True), (3, False)])
def test_chunks_that_may_become_text_are_counted_as_pieces(max_pieces, is_refused):
    """Before a probe has chosen them; then nobody could be told."""
    loop = Loop(num_states=4, max_pieces=max_pieces)
    request = loop.submit([A, B, C, D, QUESTION], "p0", max_new_tokens=1, link="whole:ratio=0.5")
    assert (request.to_finish is not None) == is_refused
    if is_refused:
        assert "3 pieces of text" in request.to_finish.message
        return loop.abort(request)
    loop.run()
    assert len(request.output_ids) == 1


def test_a_chunk_from_the_host_needs_its_own_state_alone():
    """Not those of the chunks that it begins with, for which the device may have no room."""
    loop = Loop(num_states=2, host_size=200)
    for count in range(1, 4):
        loop.warm((CHUNK, (*A[1], *B[1][:count])))
    loop.tree_cache.evict(EvictParams(num_tokens=100))
    last = loop.submit([(CHUNK, (*A[1], *B[1][:3])), QUESTION], "p0", max_new_tokens=1)
    assert loop.states(last) == [ChunkState.HOST]
    loop.run()
    assert loop.log == [["p0"]]
    assert lost(loop) == 0


@pytest.mark.parametrize("same", [True, False])
def test_prompts_of_one_batch_claim_the_state_of_a_chunk_once(same):
    """Two with the same new chunk are admitted where there is a state for one chunk; two with a chunk each are not."""
    loop = Loop(num_states=1)
    reqs = [loop.submit([A if same else chunk, QUESTION], f"r{i}", max_new_tokens=1) for i, chunk in enumerate((A, B))]
    loop.step()
    assert len(loop.tree_cache.admission.holders) == 1 + same
    loop.run()
    assert [len(req.output_ids) for req in reqs] == [1, 1]

"""Which waiting requests one batch may take, given so many free tokens, states and pieces."""

import math

import pytest
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from fakes.loop import QUESTION, A, B, C, Loop
from fakes.requests import NEUTRAL_PREAMBLE, TEXT, new_request
from fakes.storage import Storage
from sglang_lazy.scheduler.candidates import Candidates

pytestmark = pytest.mark.usefixtures("sglang_context")

OTHER_QUESTION = (TEXT, (3,))
TEXT_NEED = 3
"""Tokens that a prompt of one text token and an answer of one token need; SGLang counts one more."""
FILL_NEED = 5
"""Those of a missing chunk, which a fill computes."""
COPY_NEED = 4
"""Those of a chunk's copy, and of a cached chunk that is not locked yet."""


def plain(need, name=None, num_new=1):
    """A request without chunks that needs so many tokens."""
    return new_request([(TEXT, (7,) * (need - num_new - 1))], rid=name or f"needs {need}", max_new_tokens=num_new)


def parent(loop, *chunks, link=None, question=QUESTION):
    """One of `TEXT_NEED` besides its chunks, named after them."""
    name = "".join("ABC"[[A, B, C].index(chunk)] for chunk in chunks)
    return loop.submit([*chunks, question], name, max_new_tokens=1, link=link or loop.link)


def leave_free(loop, num_tokens):
    """Take all tokens but so many."""
    assert loop.pools.slots.alloc(loop.admission.budget.num_free() - num_tokens) is not None


def candidates(loop, running=(), max_pieces=math.inf, chunked=None, alone=False, admit=None, blocked=None):
    admission = loop.admission
    acts = admission.cached, admit or admission._admit, blocked or admission._blocked
    return Candidates(loop.store, admission.budget, running, max_pieces, chunked, alone, *acts)


def taken(loop, *later, **options):
    """The names of what a batch may take of the queue, and of `later` ones."""
    batch = candidates(loop, **options)
    all(map(batch.add, [*loop.waiting_queue, *later]))  # up to the first that must wait
    return [req.rid.removeprefix("\0") for req in batch.requests]


def names(*reqs):
    return [req.rid for req in reqs]


# Memory of requests that are left out


@pytest.mark.parametrize(
    "needs, num_taken", [([5], 1), ([6], 0), ([3, 3], 1)], ids=["it fits", "it would take the memory", "the second one"]
)
@pytest.mark.parametrize("reason", ["its probe runs", "its chunk comes from storage", "it runs after its chunk"])
def test_a_request_that_is_left_out_keeps_its_memory(reason, needs, num_taken):
    """Later requests have what is left, and the first that needs more waits, plain ones too."""
    storage, need, before = Storage(), TEXT_NEED, []
    if reason == "its probe runs":
        loop = Loop(overlap=True, link="query:ratio=0.4")
        parent(loop, A)
        loop.step()
        assert loop.log == [["\0fill-0", "\0probe-0"]]
    elif reason == "its chunk comes from storage":
        loop = Loop(host_size=100, storage=storage)
        loop.warm(B)
        storage.open.clear()
        parent(loop, A, B)
        assert loop.store.fetching
    else:
        loop, need, before = Loop(link="copy"), TEXT_NEED + COPY_NEED + FILL_NEED, ["fill-0"]
        parent(loop, A)
        assert taken(loop) == before, "it is admitted, and its chunk does not run yet"
    leave_free(loop, need + 5)
    later = [plain(each, f"p{i}") for i, each in enumerate(needs)]
    assert taken(loop, *later) == before + names(*later[:num_taken])
    storage.open.set()


def test_a_parent_waits_for_storage_since_it_was_first_looked_at():
    storage = Storage()
    loop = Loop(host_size=100, storage=storage)
    storage.open.clear()
    state, looks = parent(loop, A).lazy, []
    for _ in range(2):
        taken(loop)
        looks.append(state.waits_since)
    storage.open.set()
    assert looks[0] == looks[1] is not None


@pytest.mark.parametrize("need, is_taken", [(4, True), (5, False)])
def test_a_probe_keeps_the_memory_of_its_parent(need, is_taken):
    """Which runs next, and has an answer."""
    loop = Loop(link="query:ratio=0.4")
    loop.warm(A)
    loop.submit([A, OTHER_QUESTION], "parent", max_new_tokens=7)
    leave_free(loop, COPY_NEED + TEXT_NEED + 6 + 4)
    assert taken(loop, plain(need)) == ["probe-1"] + [f"needs {need}"] * is_taken


def test_plain_requests_are_left_to_sglang():
    """As long as nobody is left out: it counts what they need."""
    loop = Loop()
    leave_free(loop, 3)
    assert taken(loop, *[plain(50, name) for name in "ab"]) == ["a", "b"]


# Parents


@pytest.mark.parametrize("link, preamble", [("block", ()), ("base", NEUTRAL_PREAMBLE)])
@pytest.mark.parametrize("num_lacking", [0, 1, 4])
def test_a_parent_that_does_not_fit_blocks_all_after_it(num_lacking, link, preamble):
    """It needs memory for its missing chunks, and for the preamble that they are computed after."""
    loop, blocked = Loop(link=link), []
    parent(loop, A, B)
    leave_free(loop, TEXT_NEED + 2 * FILL_NEED + len(preamble) - num_lacking)
    batch = taken(loop, plain(3), blocked=lambda req, short: blocked.append((req.rid, short)))
    assert (batch, blocked) == (([], [("AB", num_lacking)]) if num_lacking else (["fill-0", "AB", "needs 3"], []))


def test_what_running_requests_will_answer_is_not_free():
    """Nor is what is left of the request in chunked prefill."""
    loop = Loop(chunked_prefill_size=2)
    loop.submit([(TEXT, (7,) * 6)], "cut", max_new_tokens=1)
    loop.step()
    parent(loop, A)
    leave_free(loop, TEXT_NEED + FILL_NEED + 9 + 4)
    running = [plain(11, num_new=9)]
    assert taken(loop, running=running) == ["fill-0", "A"]
    loop.pools.slots.alloc(1)
    loop.admission.let_go()
    assert taken(loop, running=running) == []


@pytest.mark.parametrize(
    "num_new, num_answered, ratio, expected",
    [(9, 0, 1.0, 9), (9, 4, 1.0, 5), (9, 4, 0.5, 2.5), (CLIP_MAX_NEW_TOKENS + 9, 3, 1.0, CLIP_MAX_NEW_TOKENS)],
    ids=["all", "the rest", "a share of it", "at most SGLang's limit"],
)
def test_how_much_of_an_answer_is_expected(num_new, num_answered, ratio, expected):
    loop = Loop()
    loop.new_token_ratio_tracker.current = ratio
    request = plain(num_new + 2, num_new=num_new)
    request.output_ids.extend([7] * num_answered)
    assert loop.admission.budget.for_answers([request]) == expected


def test_tokens_that_may_be_drafted_beyond_an_answer_need_slots(monkeypatch):
    loop, request = Loop(), plain(20, num_new=9)
    monkeypatch.setattr(type(loop.admission.facts), "num_ahead", 5)
    assert loop.admission.budget.own_need(request, None) == 20 + 5
    assert loop.admission.budget.for_answers([request]) == 9 + 5


def test_a_request_that_was_retracted_needs_as_much_as_before():
    """For a part of its answer as text, and for the rest."""
    loop, request = Loop(), plain(20, num_new=9)
    request.output_ids.extend([7] * 4)
    assert loop.admission.budget.own_need(request, None) == 20


@pytest.mark.parametrize("num_lacking", [0, 1])
def test_a_chunk_that_is_half_computed_needs_no_more_memory(num_lacking):
    """But for what is left of it."""
    loop = Loop(chunked_prefill_size=2)
    parent(loop, A)
    loop.step()
    parent(loop, A, question=OTHER_QUESTION)
    assert loop.admission.budget.num_left() == 2
    leave_free(loop, 2 + 2 * TEXT_NEED - num_lacking)
    batch = candidates(loop, chunked=loop.chunked_req)
    assert list(map(batch.add, loop.waiting_queue)) == [True, num_lacking == 0]


def test_a_parent_that_is_admitted_is_not_blocked():
    """What it needs was free then."""
    loop = Loop()
    parent(loop, A)
    assert taken(loop) == ["fill-0", "A"]
    leave_free(loop, 0)
    assert taken(loop) == ["fill-0", "A"]


def test_the_first_parent_may_take_all_memory_if_it_is_alone():
    """The next may not."""
    loop = Loop()
    parent(loop, A, B)
    leave_free(loop, TEXT_NEED + 2 * FILL_NEED - 1)
    parent(loop, C)
    assert taken(loop) == []
    assert taken(loop, alone=True) == ["fill-0", "AB"]


def test_a_parent_after_a_plain_request_is_not_alone():
    loop = Loop()
    asks = parent(loop, A)
    leave_free(loop, 3 + TEXT_NEED + FILL_NEED - 1)
    batch = candidates(loop, alone=True)
    assert list(map(batch.add, [plain(3), asks])) == [True, False]


def test_a_second_parent_is_not_alone_beside_one_that_is_left_out():
    """The next batch has enough to compute without the first, which has been admitted, and keeps its memory."""
    loop, admitted = Loop(), []
    reqs = [parent(loop, A), parent(loop, B)]
    leave_free(loop, 2 * (TEXT_NEED + FILL_NEED) - 1)
    assert taken(loop, alone=True, admit=lambda req, *_: admitted.append(req)) == []
    assert admitted == reqs[:1]


# Slots that a policy takes in addition


@pytest.mark.parametrize("link, expected", [("block", 3), ("copy", 1)])
def test_slots_for_copies_are_free_for_every_later_request(link, expected):
    """SGLang does not count them, so that it would take plain requests whose memory the copies need."""
    loop = Loop(link=link)
    loop.warm(A)
    parent(loop, A)
    num_copied = COPY_NEED if link == "copy" else 0
    leave_free(loop, COPY_NEED + TEXT_NEED + num_copied + 3)
    assert taken(loop, *[plain(3, name) for name in "abc"]) == ["A", "a", "b", "c"][: 1 + expected]


@pytest.mark.parametrize("need, is_taken", [(6, True), (7, False)])
def test_answers_leave_room_for_prompts_beside_copies(need, is_taken):
    """Those of running requests, and a request's own: they come later."""
    loop = Loop(link="copy")
    loop.warm(A)
    parent(loop, A)
    running = [plain(7, num_new=5)]
    leave_free(loop, COPY_NEED + TEXT_NEED + COPY_NEED + 5)
    later = plain(need + 8, "p", num_new=9)
    assert taken(loop, later, running=running) == ["A"] + ["p"] * is_taken


@pytest.mark.parametrize("num_free, is_taken", [(6, True), (5, False)])
def test_copies_need_free_slots_when_the_batch_is_formed(num_free, is_taken):
    """What was free when their parent was admitted may be pinned by now."""
    loop = Loop(link="copy")
    loop.warm(A)
    parent(loop, A)
    assert taken(loop) == ["A"]
    leave_free(loop, num_free)
    assert taken(loop) == ["A"] * is_taken


def test_fills_run_beside_copies_only_if_their_parent_fits():
    """Though it has been admitted."""
    loop = Loop()
    loop.warm(A)
    parent(loop, A, link="copy")
    parent(loop, B)
    assert taken(loop) == ["A", "fill-1", "B"]
    leave_free(loop, TEXT_NEED + COPY_NEED + TEXT_NEED - 2)
    assert taken(loop) == ["A"]


# Window KV, in a pool of its own


@pytest.mark.parametrize(
    "num_new, ratio, expected", [(3, 1.0, 3), (9, 1.0, 4), (9, 0.5, 2)], ids=["all", "the last", "a share of them"]
)
def test_answers_need_window_kv_for_their_last_tokens(num_new, ratio, expected):
    loop = Loop(window=4, window_size=40)
    loop.new_token_ratio_tracker.current = ratio
    budget, running = loop.admission.budget, [plain(num_new + 2, num_new=num_new)]
    assert budget.windows_for_waiting([]) - budget.windows_for_waiting(running) == expected


def test_window_kv_of_what_is_left_of_a_prompt_is_not_free():
    loop = Loop(window=4, window_size=40, chunked_prefill_size=2)
    loop.submit([(TEXT, (7,) * 6)], "cut", max_new_tokens=1)
    loop.step()
    assert loop.admission.budget.windows_for_waiting([]) == loop.store.device.windows.free - 4


@pytest.mark.parametrize("num_lacking, num_taken", [(0, 3), (1, 1)])
def test_parents_need_window_kv_of_their_chunks_and_their_own(num_lacking, num_taken):
    """Of a cached chunk, that of its last tokens; of a missing one, all."""
    loop = Loop(window=2, window_size=40)
    loop.warm(A)
    parent(loop, A, question=OTHER_QUESTION)
    parent(loop, B)
    need = 2 + TEXT_NEED + FILL_NEED + TEXT_NEED - num_lacking
    assert loop.pools.slots.swa_attn_allocator.alloc(loop.store.device.windows.free - need) is not None
    assert taken(loop) == ["A", "fill-1", "B"][:num_taken]


# Pieces


@pytest.mark.parametrize("num_cut", [0, 2], ids=["", "beside one in chunked prefill"])
@pytest.mark.parametrize("max_pieces, num_taken", [(5, 4), (4, 3), (3, 2), (2, 1), (1, 0)])
def test_a_batch_takes_only_so_many_pieces(max_pieces, num_taken, num_cut):
    """A fill has one for each chunk, and has them once, however many parents wait for it."""
    loop, chunked = Loop(), None
    if num_cut:
        chunked = loop.submit([QUESTION, C, QUESTION], "cut")
        loop.abort(chunked)
    parent(loop, A, B)
    parent(loop, B, A)
    batch = taken(loop, plain(3), max_pieces=max_pieces + num_cut, chunked=chunked)
    assert batch == ["fill-0", "AB", "BA", "needs 3"][:num_taken]


# States of recurrent layers


@pytest.mark.parametrize("num_states, admitted", [(4, ["AB", "AC", "CB"]), (3, ["AB", "AC", "CB"]), (2, ["AB"])])
def test_parents_of_a_batch_claim_the_state_of_a_chunk_once(num_states, admitted):
    """Their fills reserve it when they run. The first that would need more waits, and all after it."""
    loop = Loop(num_states=num_states)
    for chunks in ((A, B), (A, C), (C, B)):
        parent(loop, *chunks)
    taken(loop)
    assert names(*loop.admission.holders) == admitted


@pytest.mark.parametrize("num_states, admitted", [(4, ["A", "B", "C"]), (3, ["A", "B"]), (2, ["A"])])
def test_fills_do_not_count_on_states_that_the_batch_reads(num_states, admitted):
    """That of a cached chunk, and that of text, either of which could be evicted before."""
    loop = Loop(num_states=num_states)
    loop.warm(A)
    assert loop.store.states.num_texts == 1
    for chunk in (A, B, C):
        parent(loop, chunk, question=OTHER_QUESTION)
    taken(loop)
    assert names(*loop.admission.holders) == admitted


@pytest.mark.parametrize(
    "num_texts, pieces_each, num_taken",
    [(2, 1, 2), (2, 2, 1), (1, 2, 1)],
    ids=["one each", "two of one", "no more than there are"],
)
def test_requests_claim_the_states_of_text_that_they_may_read(num_texts, pieces_each, num_taken):
    """Of as many as they have pieces: no other states are free here."""
    loop = Loop(num_states=8)
    loop.warm(A)
    if num_texts == 2:
        loop.submit([A, OTHER_QUESTION], "before", max_new_tokens=1)
        loop.run()
    states = loop.store.states
    assert states.num_texts == num_texts
    reqs = [loop.submit([(TEXT, (9, i)), A, QUESTION][-1 - pieces_each :], f"p{i}") for i in range(3)]
    assert loop.visible() == reqs
    states.allocate(states.pool.available_size())
    assert taken(loop) == names(*reqs[:num_taken])


@pytest.mark.parametrize("num_states, are_spare", [(3, True), (2, False)])
def test_states_are_spare_beyond_those_of_chunks_to_be_computed(num_states, are_spare):
    loop = Loop(num_states=num_states)
    parent(loop, A, B)
    taken(loop)
    assert loop.admission.budget.has_spare_states() == are_spare


def test_a_chunk_that_is_half_computed_has_its_state():
    loop = Loop(num_states=2, chunked_prefill_size=2)
    parent(loop, A)
    loop.step()
    assert loop.chunked_req is not None and loop.admission.budget.has_spare_states()


# Kinds


@pytest.mark.parametrize(
    "chunked, expected",
    [(None, ["a", "b"]), ("plain", ["a"]), ("probe", [])],
    ids=["the first one's", "of a plain one in chunked prefill", "of a probe in chunked prefill"],
)
def test_a_batch_has_one_kind(chunked, expected):
    """A probe that computes the whole prompt is passed by those that share a batch with the first one, but not by more
    and more of those that share one with a prefill that is cut."""
    loop = Loop(link="blend:ratio=0.4")
    loop.warm(A)
    asks = parent(loop, A, question=OTHER_QUESTION)
    batch = candidates(loop)
    assert all(map(batch.add, [plain(3, "a"), asks, plain(3, "b")]))
    assert names(*batch.requests) == ["a", "\0probe-1", "b"]
    cut = {None: None, "plain": plain(3, "cut"), "probe": asks.lazy.probe}[chunked]
    assert names(*batch.of_one_kind(cut, masks_images=False)) == expected

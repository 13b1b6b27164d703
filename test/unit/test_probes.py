"""Probes, by which some policies choose what to recompute: they run before their parents, and choices are
remembered."""

import random
from array import array

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from fakes.attention import most_attended
from fakes.loop import QUESTION, A, B, C, D, Loop
from fakes.requests import CHUNK, TEXT, kept_in
from sglang_lazy.core.prompt import positions_in
from sglang_lazy.core.state import LinkedRequest, Undecided, lazy_state
from sglang_lazy.scheduler.choices import Choices

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])

LINK, RATIO = "query:ratio=0.4", 0.4
LEAD, OTHER_QUESTION = (TEXT, (9, 8)), (TEXT, (3, 11))


def query_loop(*args, **kwargs):
    return Loop(*args, link=LINK, **kwargs)


def launches(scheduler, kind):
    """The ids of the internal requests of this kind that ran, each once, in order."""
    return list(dict.fromkeys(rid for batch in scheduler.log for rid in batch if rid.startswith(f"\0{kind}")))


def recomputed(req):
    """Positions of the chunk tokens that `req` recomputes, without its last token."""
    kept = kept_in(lazy_state(req), req.layout)
    positions = set()
    for (start, end), ranges in zip(req.layout.chunks, kept, strict=True):
        positions |= set(range(start, end)) - {start + i for i in positions_in(ranges).tolist()}
    return positions - {len(req.origin_input_ids) - 1}


def check_answer(req, chosen_for=None):
    """The answer is complete, over the tokens its own question attends to most, or an earlier turn's (`chosen_for`)."""
    assert len(req.output_ids) == req.sampling_params.max_new_tokens
    asked = chosen_for or req
    assert recomputed(req) == most_attended(asked, asked.layout.chunks, RATIO)


@both_loops
@pytest.mark.parametrize("chunked_prefill_size", [2, 3, 64])
@pytest.mark.parametrize("parts", [[LEAD, A, QUESTION, B, OTHER_QUESTION], [A, B], [LEAD, A, A, QUESTION]])
def test_a_probe_runs_before_its_parent(overlap, chunked_prefill_size, parts):
    """The order is fills, probe, parent, in pieces too; the parent runs over what the probe chose."""
    scheduler = query_loop(overlap=overlap, chunked_prefill_size=chunked_prefill_size)
    parent = scheduler.submit(parts, "p0")
    assert isinstance(lazy_state(parent), Undecided)
    while any(req.rid == "p0" for req in scheduler.waiting_queue):
        scheduler.step()
    assert scheduler.log[-1] == ["p0"]
    (probe,) = launches(scheduler, "probe")
    last = [next(i for i in reversed(range(len(scheduler.log))) if rid in scheduler.log[i]) for rid in (probe, "p0")]
    assert max(i for i, batch in enumerate(scheduler.log) if any("fill" in rid for rid in batch)) <= last[0] < last[1]
    scheduler.run()
    check_answer(parent)


@both_loops
def test_probe_and_fills_share_a_batch(overlap):
    """As with parents: the probe's row reads what the same pass computes."""
    scheduler = query_loop(overlap=overlap)
    parents = [scheduler.submit([LEAD, A, B, text], f"p{i}") for i, text in enumerate([QUESTION, OTHER_QUESTION])]
    other = scheduler.submit([B, C, QUESTION], "other", link="block")
    scheduler.step()
    assert scheduler.log == [["\0fill-0", "\0probe-0", "\0probe-1", "\0fill-1", "other"]]
    assert scheduler.waiting_queue == parents, "parents wait where SGLang's abort and timeouts look for them"
    scheduler.run()
    for parent in parents:
        check_answer(parent)
    assert len(other.output_ids) == 3


@both_loops
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
def test_twins(overlap, chunked_prefill_size):
    """Two parents with the same prompt, neither finished when the other arrives, each have a probe; both choose
    alike."""
    scheduler = query_loop(overlap=overlap, chunked_prefill_size=chunked_prefill_size)
    twins = [scheduler.submit([LEAD, A, B, QUESTION], f"p{i}") for i in range(2)]
    scheduler.run()
    for req in twins:
        check_answer(req)
    assert twins[0].lazy.prompt.chunks[0].kept == twins[1].lazy.prompt.chunks[0].kept


@both_loops
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
@pytest.mark.parametrize("when", range(8))
def test_aborted_parents(overlap, chunked_prefill_size, when):
    """Aborted before, during or after their probe: nothing stays locked, as the idle loop checks, and others that wait
    for the same chunks are answered."""
    scheduler = query_loop(60, overlap=overlap, chunked_prefill_size=chunked_prefill_size)
    aborted = scheduler.submit([LEAD, A, B, QUESTION], "aborted")
    others = [
        scheduler.submit([LEAD, B, A, QUESTION], "query"),
        scheduler.submit([LEAD, A, C, QUESTION], "block", link="block"),
    ]
    for _ in range(when):
        scheduler.step()
    if aborted not in scheduler.waiting_queue:
        assert when >= 2
        scheduler.run()
        return check_answer(aborted)
    scheduler.abort(aborted)
    scheduler.run()
    assert not aborted.output_ids and all(len(req.output_ids) == 3 for req in others)
    check_answer(others[0])
    scheduler.tree_cache.evict(EvictParams(num_tokens=60))
    assert scheduler.pools.slots.available_size() == 60


@both_loops
@pytest.mark.parametrize("times", [1, 2])
def test_a_probe_aborted_between_pieces_is_replaced(overlap, times):
    """The new one measures everything: what the aborted one measured is discarded."""
    scheduler = query_loop(overlap=overlap, chunked_prefill_size=3)
    scheduler.warm(A, B)
    parent = scheduler.submit([LEAD, A, B, (TEXT, (3, 4, 5, 6, 7, 10)), QUESTION], "p0")
    aborted = []
    for _ in range(times):
        while scheduler.chunked_req is None or scheduler.chunked_req in aborted:
            scheduler.step()
        scheduler.step()
        aborted.append(scheduler.abort_chunked())
    assert len(set(aborted)) == times and all(req.rid.startswith("\0probe") for req in aborted)
    scheduler.run()
    assert len(launches(scheduler, "probe")) == times + 1
    check_answer(parent)


@both_loops
def test_a_waiting_probe_is_neither_doubled_nor_queued(overlap):
    """A second look at the queue makes no second probe; a probe that is requeued is dropped."""
    scheduler = query_loop(overlap=overlap)
    parent = scheduler.submit([A, QUESTION], "p0")
    visible = scheduler.visible()
    assert scheduler.visible() == visible and scheduler.admission.holders == visible[1:]
    scheduler._add_request_to_queue(visible[1])
    assert scheduler.waiting_queue == [parent]
    assert visible[1].finished_output and visible[1].rid.startswith("\0")
    scheduler.run()
    check_answer(parent)


@both_loops
def test_chunks_evicted_between_probe_and_parent(overlap):
    """They are computed again and are no hits; the choice stands."""
    scheduler = query_loop(overlap=overlap)
    scheduler.warm(A, B)
    parent = scheduler.submit([LEAD, A, B, QUESTION], "p0")
    while isinstance(lazy_state(parent), Undecided):
        scheduler.step()
    assert not parent.output_ids and parent.lazy.hit_mask == 0b11
    holder = scheduler.store.find(parent.lazy.prompt.chunks[1])
    scheduler.tree_cache.tree.lock(holder)
    scheduler.tree_cache.evict(EvictParams(num_tokens=100))
    scheduler.tree_cache.tree.unlock(holder)
    scheduler.log.clear()
    scheduler.run()
    assert len(launches(scheduler, "fill")) == 1 and not launches(scheduler, "probe")
    check_answer(parent)
    assert scheduler.counts(parent)[1:] == (parent.lazy.prompt.chunks[1].num_kept, 0b10)


@both_loops
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
def test_counts_are_honest(overlap, chunked_prefill_size):
    """What a request's own probe or fills computed is no hit."""
    scheduler = query_loop(overlap=overlap, chunked_prefill_size=chunked_prefill_size)
    cold = scheduler.submit([LEAD, A, QUESTION, B, QUESTION], "cold", max_new_tokens=1)
    scheduler.run()
    assert scheduler.counts(cold) == (0, 0, 0)
    partly = scheduler.submit([LEAD, C, B, OTHER_QUESTION], "partly", max_new_tokens=1)
    scheduler.run()
    kept_of_b = partly.lazy.prompt.chunks[-1].num_kept
    assert scheduler.counts(partly) == (2 + kept_of_b, kept_of_b, 0b10), "the lead is cached"
    again = scheduler.submit([LEAD, A, QUESTION, B, QUESTION], "again", max_new_tokens=1)
    scheduler.run()
    assert scheduler.counts(again) == (2 + 4 + 1 + 4, again.lazy.prompt.num_chunk_tokens, 0b11), (
        "all but the prompt's last token"
    )


@both_loops
@pytest.mark.parametrize("link", [LINK, "copy"])
@pytest.mark.parametrize("other", [[A, QUESTION], [(TEXT, (5, 6, 7))]], ids=["chunks", "plain"])
def test_answers_come_in_order_where_memory_is_tight(overlap, link, other):
    """While a parent's probe or fill runs, requests behind the parent must not take its memory."""
    scheduler = Loop(34, overlap=overlap)
    for i in range(4):
        if i % 2:
            scheduler.submit(other, f"r{i}", max_new_tokens=16)
        else:
            scheduler.submit([A, (TEXT, (i,))], f"r{i}", link=link, max_new_tokens=16)
    scheduler.run()
    users = dict.fromkeys(rid for batch in scheduler.log for rid in batch if rid.startswith("r"))
    assert list(users) == ["r0", "r1", "r2", "r3"]
    assert len(launches(scheduler, "probe")) == (2 if link == LINK else 0)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_a_probe_of_another_kind_does_not_wait_for_ever(overlap):
    """It shares no batch with others. There are always more of them, and in each batch the last one is cut."""
    scheduler = Loop(400, chunked_prefill_size=40, overlap=overlap, num_rows=30)
    scheduler.warm(A)

    def keep_busy(first):
        for i in range(first, first + 4 - len(scheduler.waiting_queue)):
            scheduler.submit([(TEXT, tuple((i + j * j + i * j) % 14 for j in range(41)))], f"{i}", max_new_tokens=1)

    keep_busy(0)
    scheduler.step()
    behind = len(scheduler.waiting_queue)
    req = scheduler.submit([A, QUESTION], "probed", link="blend:ratio=0.5", max_new_tokens=1)
    for i in range(2 * behind + 4):
        keep_busy(10 * i + 10)
        scheduler.step()
    assert req.finished()


def test_a_prompt_that_does_not_fit_beside_what_may_be_recomputed():
    """Recomputation may add up to its share to the text; a prompt that could not be served then is refused on
    arrival."""
    num_recomputed = 4  # of 8
    tight = 8 + 1 + num_recomputed + 2  # an answer token and the one that SGLang adds: nothing would be left
    for pool_size, refused in ((tight, True), (tight + 1, False)):
        scheduler = query_loop(pool_size)
        req = scheduler.submit([A, B, QUESTION], "p0", max_new_tokens=1)
        assert (req.to_finish is not None) == refused
        if refused:
            assert "do not fit together into the KV pool" in req.to_finish.message and lazy_state(req) is None
        else:
            scheduler.run()
            check_answer(req)


def test_everything_recomputed_is_an_ordinary_request():
    """The first probe is wasted; afterwards it is known that nothing is kept."""
    scheduler = Loop(link="query:ratio=1.0")
    for rid in ("p0", "p1"):
        req = scheduler.submit([LEAD, A, QUESTION], rid)
        scheduler.run()
        assert lazy_state(req) is None and len(req.output_ids) == 3
    assert len(launches(scheduler, "probe")) == 1


def test_a_prompt_of_one_chunk_token_has_nothing_to_choose():
    """Its last token is text in any case."""
    scheduler = query_loop()
    req = scheduler.submit([LEAD, (CHUNK, (1,))], "p0")
    assert req.to_finish is None and lazy_state(req) is None
    scheduler.run()


# Remembered choices


def ask(scheduler, parts, rid, **kwargs):
    """Serve one request alone; returns whether it was probed."""
    scheduler.log.clear()
    req = scheduler.submit(parts, rid, max_new_tokens=2, **kwargs)
    scheduler.run()
    return req, bool(launches(scheduler, "probe"))


@both_loops
def test_which_choices_are_recalled(overlap):
    """The choice holds for the same prompt and for its continuation, answer included; not for another question, tenant,
    policy or division into chunks."""
    scheduler = query_loop(200, overlap=overlap)
    prompt = [LEAD, A, B, QUESTION]
    first, probed = ask(scheduler, prompt, "first")
    assert probed
    for parts in (prompt, [*prompt, (TEXT, tuple(first.output_ids)), OTHER_QUESTION], [*prompt, OTHER_QUESTION]):
        req, probed = ask(scheduler, parts, "again")
        assert not probed
        check_answer(req, chosen_for=first)
    anew = {
        "another question": ([LEAD, A, B, OTHER_QUESTION], {}),
        "a shorter one": ([LEAD, A, B], {}),
        "extra_key": (prompt, {"extra_key": "tenant"}),
        "cache_salt": (prompt, {"cache_salt": "tenant"}),
        "another ratio": (prompt, {"link": "query:ratio=0.5"}),
        "a preamble": (prompt, {"link": "base+query:ratio=0.4"}),
        "another cut": ([LEAD, (CHUNK, A[1] + B[1]), QUESTION], {}),
        "text for a chunk": ([LEAD, (TEXT, A[1]), B, QUESTION], {}),
    }
    for what, (parts, kwargs) in anew.items():
        for expected in (True, False):
            _, probed = ask(scheduler, parts, what, **kwargs)
            assert probed == expected, what


@both_loops
@pytest.mark.parametrize("chunked_prefill_size", [3, 64])
def test_new_chunks_of_a_later_turn(overlap, chunked_prefill_size):
    """Only they are probed: earlier chunks keep the same tokens as before, so the text after them is found again."""
    scheduler = query_loop(200, overlap=overlap, chunked_prefill_size=chunked_prefill_size)
    prompt = [LEAD, A, B, QUESTION]
    first, _ = ask(scheduler, prompt, "first")
    following = [*prompt, (TEXT, tuple(first.output_ids)), C, D, OTHER_QUESTION]
    second, probed = ask(scheduler, following, "second")
    assert probed
    chosen = most_attended(first, first.layout.chunks, RATIO)
    assert recomputed(second) == chosen | most_attended(second, second.layout.chunks[2:], RATIO)
    third, probed = ask(scheduler, [*following, QUESTION], "third")
    assert not probed and recomputed(third) == recomputed(second)
    again, probed = ask(scheduler, [*prompt, OTHER_QUESTION], "again")
    assert not probed and recomputed(again) == chosen


def test_choices_are_bounded():
    """The least recently used choice is dropped."""
    one, chunks = Choices(), ((0, 2),)
    one.remember(("who",), array("q", [1, 1, 9]), chunks, [((0, 1),)])
    choices = Choices(capacity=3 * one._choices.num_bytes)
    prompts = [array("q", [i, i, 9]) for i in range(4)]
    for i in range(3):
        choices.remember(("who",), prompts[i], chunks, [((0, i),)])
    assert choices.recall(("who",), prompts[0], chunks) == (((0, 0),),)
    choices.remember(("who",), prompts[1], chunks, [((0, 7),)])
    choices.remember(("who",), prompts[3], chunks, [((0, 3),)])
    kept = [choices.recall(("who",), prompt, chunks) for prompt in prompts]
    assert kept == [(((0, 0),),), (((0, 7),),), (), (((0, 3),),)]
    assert len(choices._choices) == 3


@both_loops
@pytest.mark.parametrize("seed", range(8))
def test_everything_is_answered_in_a_tight_pool(seed, overlap):
    """Random requests of all policies and aborts: all others finish, and nothing stays locked."""
    dice = random.Random(seed)
    pool_size, size = 48, dice.choice([3, 5, 64])
    scheduler = Loop(pool_size, overlap=overlap, chunked_prefill_size=size, max_fill_tokens=dice.choice([3, 9, 64]))
    links = [LINK, LINK, "base+query:ratio=0.4", "blend:ratio=0.4", "base+blend:ratio=0.2", "static:ratio=0.4"]
    links += ["query:ratio=0.4,static=0.2"]
    links += ["base", "base:preamble=lead", "base+epic:tokens=2", "copy", "block", "kvlink", "packet"]
    reqs, aborted = [], set()
    for i in range(30):
        parts = [dice.choice([A, B, C, D, QUESTION, LEAD, (CHUNK, (1, 2))]) for _ in range(dice.randint(1, 5))]
        req = scheduler.submit(parts, f"r{i}", link=dice.choice(links), max_new_tokens=dice.randint(1, 9))
        assert req.to_finish is None
        reqs.append(req)
        aborted |= scheduler.disturb(dice)
    scheduler.run(2000)
    for req in reqs:
        assert req in aborted or len(req.output_ids) == req.sampling_params.max_new_tokens
    assert any(isinstance(lazy_state(req), LinkedRequest) and req.lazy.policy.probes for req in reqs)
    scheduler.tree_cache.evict(EvictParams(num_tokens=pool_size))
    assert scheduler.pools.slots.available_size() == pool_size


def test_recomputed_tokens_of_all_chunks_are_reserved_on_arrival():
    """Rounded up for each chunk, the recomputed share exceeds that of the prompt: a request is refused on arrival or
    served."""
    chunks = [(CHUNK, (i, 1, 2)) for i in range(3, 9)]
    answered = refused = 0
    for pool_size in range(20, 40):
        scheduler = Loop(pool_size)
        req = scheduler.submit([*chunks, QUESTION], "r", link="static:ratio=0.1", max_new_tokens=1)
        refused += req.to_finish is not None
        if req.to_finish is None:
            scheduler.run()
            answered += len(req.output_ids) == 1
    assert answered and refused and answered + refused == 20

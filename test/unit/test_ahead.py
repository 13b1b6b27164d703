"""Chunks computed ahead of use: users' prompts go first, and on a busy server one gets its turn now and then."""

import pytest

from fakes.loop import QUESTION, A, Loop
from fakes.requests import CHUNK, TEXT
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.core.state import is_ahead, linked
from sglang_lazy.policies import get_policy
from sglang_lazy.scheduler.ahead import PATIENCE
from sglang_lazy.serving.registration import prompt_for

pytestmark = pytest.mark.usefixtures("sglang_context")
both_loops = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
policies = pytest.mark.parametrize("policy", ["fcfs", "lpm"])
NUMBER = 20


def chunk(i):
    return (CHUNK, (1 + i % 12, 2 + i // 12, *range(3, 11)))


def register(loop, number=NUMBER, **options):
    return [
        loop.submit([chunk(i), QUESTION], f"ahead-{i}", ahead=True, max_new_tokens=1, **options) for i in range(number)
    ]


def passes(loop, rid):
    """In which pass each request was first launched."""
    return next(i for i, rids in enumerate(loop.log) if rid in rids)


def passes_with_fills(loop):
    return [rids for rids in loop.log if any(rid.startswith("\0fill") for rid in rids)]


def test_a_registered_chunk_is_computed_ahead():
    ids, plan = prompt_for([5, 6], get_policy("base+query"), "s")
    assert PromptLayout.unpack(plan.pack(), len(ids)) == PromptLayout(((0, 2),), "s", "base", ahead=True)
    assert not PromptLayout.unpack(PromptLayout(((0, 2),)).pack(), 3).ahead


@both_loops
@policies
@pytest.mark.parametrize("prompt", [[A, QUESTION], [(TEXT, (7, 8, 9))]], ids=["chunk", "plain"])
def test_a_prompt_goes_before_all_that_wait(overlap, policy, prompt):
    """It waits for the pass under way, and shares its own with nobody."""
    loop = Loop(400, chunked_prefill_size=24, overlap=overlap, scheduler={"policy": policy})
    ahead = register(loop)
    loop.step()
    done = len(loop.log)
    loop.submit(prompt, "user", max_new_tokens=1)
    while "user" not in {rid for rids in loop.log for rid in rids}:
        loop.step()
    assert passes(loop, "user") <= done + 1
    assert not any("ahead" in rid for rid in loop.log[passes(loop, "user")])
    loop.run()
    assert all(req.finished() for req in ahead)


@both_loops
def test_answers_go_on_while_chunks_wait(overlap):
    """SGLang prefers prompts to answers: without a limit, an answer would wait for all of them."""
    loop = Loop(400, chunked_prefill_size=24, overlap=overlap)
    user = loop.submit([A, QUESTION], "user", max_new_tokens=40)
    loop.step()
    ahead = register(loop)
    while not user.finished():
        loop.step()
    prefills = passes_with_fills(loop)
    assert 1 < len(prefills) <= 2 + len(loop.log) // PATIENCE
    assert sum(req.finished() for req in ahead) < len(prefills)
    loop.run()
    assert all(req.finished() for req in ahead)


@both_loops
def test_without_other_work_nothing_is_held_back(overlap):
    loop = Loop(400, chunked_prefill_size=24, overlap=overlap)
    register(loop, 8)
    loop.run()
    prefills = passes_with_fills(loop)
    assert len(prefills) <= 5, "two share a pass"


def test_a_chunk_that_a_prompt_needs_as_well_goes_with_the_prompt():
    loop = Loop(400, chunked_prefill_size=16)
    register(loop)
    loop.step()
    last = loop.submit([chunk(NUMBER - 1), QUESTION], "user", max_new_tokens=1)
    while "user" not in {rid for rids in loop.log for rid in rids}:
        loop.step()
    assert sum("ahead" in rid for rids in loop.log for rid in rids) < NUMBER
    loop.run()
    assert last.finished() and not is_ahead(last) and linked(last) is not None


@both_loops
def test_they_go_on_under_a_steady_stream_of_prompts(overlap):
    loop = Loop(400, chunked_prefill_size=24, overlap=overlap)
    ahead = register(loop, 3)
    for i in range(6 * PATIENCE):
        loop.submit([(TEXT, (1 + i % 12, 2 + i // 12))], f"user-{i}", max_new_tokens=1)
        loop.step()
    assert all(req.finished() for req in ahead)

"""Requests with chunks that cannot be served: each gets a 400, and nothing else happens."""

import re
import types
from http import HTTPStatus

import pytest

from fakes.loop import QUESTION, A, B, Loop
from fakes.requests import TEXT, contents_of, new_request
from sglang_lazy.core.policy import ServerTraits
from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.core.state import lazy_state, linked
from sglang_lazy.port.scheduler import steps as hooks

pytestmark = pytest.mark.usefixtures("sglang_context")

MALFORMED = {
    "not json": "not json",
    "nothing in it": "{}",
    "not a string": {"v": 1},
    "another version": '{"v":0,"chunks":[[0,4]],"cache_salt":null,"link":"block"}',
    "beyond the prompt": '{"v":1,"chunks":[[0,9]],"cache_salt":null,"link":"block"}',
    "endless": '{"v":1,"chunks":[[0,Infinity]],"cache_salt":null,"link":"block"}',
    "a salt that is no string": '{"v":1,"chunks":[[0,4]],"cache_salt":[],"link":"block"}',
    "unknown link": '{"v":1,"chunks":[[0,4]],"cache_salt":null,"link":"other"}',
    "a link that is no string": '{"v":1,"chunks":[[0,4]],"cache_salt":null,"link":[]}',
}


def request_with(layout):
    req = new_request([A, QUESTION])
    req.sampling_params.custom_params = {LAYOUT_PARAM: layout}
    return req


def without_chunk_reuse():
    """A scheduler over SGLang's own cache."""
    return types.SimpleNamespace(tree_cache=object(), waiting_queue=[])


def add(scheduler, req):
    hooks.add_request_to_queue(lambda scheduler, req: scheduler.waiting_queue.append(req), scheduler, req)
    assert scheduler.waiting_queue == [req], "SGLang answers refused requests, too"


@pytest.mark.parametrize("new_scheduler", [Loop, without_chunk_reuse])
@pytest.mark.parametrize("layout", MALFORMED.values(), ids=MALFORMED)
def test_malformed_layouts(layout, new_scheduler):
    req = request_with(layout)
    add(new_scheduler(), req)
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    assert lazy_state(req) is None


@pytest.mark.parametrize("new_scheduler", [Loop, without_chunk_reuse])
def test_a_policy_that_only_the_first_process_knows(new_scheduler):
    """That has taken the request: the policy was registered there alone, in a script."""
    req = request_with(PromptLayout(((0, 4),), None, "mine:tokens=1").pack())
    add(new_scheduler(), req)
    assert re.search("link 'mine:tokens=1': .*entry point in the group 'sglang.srt.plugins'", req.to_finish.message)


def test_refused_requests_are_answered_beside_others():
    """A refused request costs one token of prefill, as with SGLang's own refusals; others do not notice."""
    scheduler = Loop()
    refused = request_with("not json")
    scheduler._add_request_to_queue(refused)
    refused.layout = PromptLayout(())
    refused.contents = contents_of(refused, ())
    served = scheduler.submit([A, QUESTION], "served", max_new_tokens=2)
    scheduler.run()
    assert refused.finished() and len(served.output_ids) == 2


def test_a_layout_without_chunks_is_an_ordinary_request():
    scheduler = Loop()
    req = request_with(PromptLayout((), "salt", "block").pack())
    add(scheduler, req)
    assert req.to_finish is None and lazy_state(req) is None


@pytest.mark.parametrize("new_scheduler", [Loop, without_chunk_reuse])
def test_link_full_is_an_ordinary_request(new_scheduler):
    req = request_with(PromptLayout(((0, 4),), "salt", "full").pack())
    add(new_scheduler(), req)
    assert req.to_finish is None and lazy_state(req) is None


@pytest.mark.parametrize("link", ["block", "copy"])
def test_without_chunk_reuse_chunks_are_refused(link):
    req = new_request([A, QUESTION], link=link)
    add(without_chunk_reuse(), req)
    assert req.to_finish.status_code == HTTPStatus.BAD_REQUEST
    assert "without chunk reuse" in req.to_finish.message and "link full" in req.to_finish.message


def test_copies_beside_an_fp8_cache_are_refused():
    """Rotating copied keys would round them a second time; keys used in place are read as they are."""
    scheduler = Loop()
    arrival = scheduler.admission.arrival
    arrival.limits = arrival.limits._replace(traits=ServerTraits(fp8_cache=True))
    refused, served = (scheduler.submit([A, QUESTION], link, link=link) for link in ("copy", "block"))
    assert "fp8" in refused.to_finish.message and served.to_finish is None


def test_prompt_that_does_not_fit_beside_its_chunks():
    """Copied chunks and their originals share the pool for a moment; what cannot fit is refused."""
    scheduler = Loop(pool_size=4 + 5)
    refused = scheduler.submit([A, QUESTION], "refused", link="copy")
    for part in ("1 tokens of text", "4 of chunks", "4 of copies", "9 tokens"):
        assert part in refused.to_finish.message
    assert scheduler.submit([A, QUESTION], "in place", max_new_tokens=1).to_finish is None
    scheduler = Loop(pool_size=4 + 5 + 1)
    assert linked(scheduler.submit([A, QUESTION], "served", link="copy", max_new_tokens=1)) is not None
    scheduler.run()


@pytest.mark.parametrize("link", ["block", "base", "copy", "epic:tokens=2", "query:ratio=0.3", "static:ratio=0.3"])
@pytest.mark.parametrize("text", [1, 3])
def test_requests_are_refused_or_answered(link, text):
    """In pools around the size at which the prompt fits; the answer may be shorter than asked for."""
    lens = []
    for pool_size in range(8, 40):
        scheduler = Loop(pool_size)
        req = scheduler.submit([A, B, (TEXT, tuple(range(10, 10 + text)))], "r", link=link, max_new_tokens=9)
        if req.to_finish is None:
            scheduler.run()
            lens.append(len(req.output_ids))
    assert lens == sorted(lens) and lens[0] < 9 == lens[-1]


@pytest.mark.parametrize(
    "name, value, reason",
    [
        ("session", object(), "a session"),
        ("input_embeds", [[0.0]], "input embeddings"),
        ("return_hidden_states", True, "hidden states"),
        ("return_routed_experts", True, "routed experts"),
    ],
)
def test_options_that_exclude_chunks(name, value, reason):
    req = new_request([A, QUESTION])
    setattr(req, name, value)
    add(Loop(), req)
    assert reason in req.to_finish.message


@pytest.mark.parametrize("start, refused", [(-1, False), (0, True), (3, True), (4, False)])
def test_prompt_logprobs_begin_behind_the_last_chunk(start, refused):
    req = new_request([A, QUESTION, QUESTION])
    req.return_logprob, req.logprob_start_len = True, start
    add(Loop(), req)
    assert (req.to_finish is not None) == refused


def test_more_chunks_than_allowed():
    for count, refused in ((8, False), (9, True)):
        req = new_request([A] * count + [QUESTION])
        add(Loop(), req)
        assert (req.to_finish is not None) == refused

"""Results: honest counts of what was reused, on every API."""

import asyncio
import copy
import inspect
import json
import pickle
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import LAYOUT_PARAM
from sglang_lazy.policies import get_policy
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.port.serving.requests import own_plan, served
from sglang_lazy.port.serving.tokenizer_manager import report_chunks
from sglang_lazy.port.serving.usage import cached_tokens_details, extend_protocol, usage_details
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.results import CachedTokens, SharedReport, chunk_report

PLAN = Plan.of(((1, 3), (4, 8)), get_policy("block"))
IDS = list(range(20, 30))


def request(**fields):
    return plain_request(sampling_params={"custom_params": {LAYOUT_PARAM: PLAN.pack()}}, **fields)


def plain_request(is_single=True, **fields):
    made = GenerateReqInput(**{"rid": "r", "input_ids": IDS, "sampling_params": {}, **fields})
    made.is_single = is_single
    return made


def output(finish_reason=None, **meta_info):
    meta_info = {"finish_reason": finish_reason, "cached_tokens": 0, "cached_tokens_details": None, **meta_info}
    return {"text": "", "meta_info": meta_info}


def collect(obj, *outputs, manager=None):
    manager = manager or SimpleNamespace(rid_to_state={})

    async def wait(manager, obj, request):
        for out in outputs:
            yield out

    async def drain():
        return [out["meta_info"] async for out in report_chunks(wait, manager, obj)]

    return asyncio.run(drain())


def test_report():
    first, second = (
        {"id": chunk_id(tokens_digest([21, 22])), "tokens": 2, "offset": 1, "hit": False, "reused_tokens": 0},
        {"id": chunk_id(tokens_digest([24, 25, 26, 27])), "tokens": 4, "offset": 4, "hit": True, "reused_tokens": 4},
    )
    assert chunk_report(PLAN.layout, IDS, hits=0b10) == [first, second]
    assert chunk_report(PLAN.layout, IDS, hits=0b10, parts={1: 3}) == [first, {**second, "reused_tokens": 3}]


def test_hits_of_which_nothing_or_a_part_is_reused():
    details = {"device": 7, "host": 0, "chunk": 3, "chunk_hits": "3", "chunk_parts": "0:0,1:3"}
    (last,) = collect(request(), output({"type": "length"}, cached_tokens=7, cached_tokens_details=details))
    assert [(chunk["hit"], chunk["reused_tokens"]) for chunk in last["chunks"]] == [(True, 0), (True, 3)]
    assert last["cached_tokens_details"] == {"device": 7, "host": 0, "chunk": 3}


def test_only_the_last_output_carries_the_report():
    details = {"device": 7, "host": 0, "chunk": 6, "chunk_hits": "1"}
    first, last = collect(
        request(),
        output(cached_tokens=7, cached_tokens_details=dict(details)),
        output({"type": "length"}, cached_tokens=7, cached_tokens_details=dict(details)),
    )
    assert "chunks" not in first and [chunk["hit"] for chunk in last["chunks"]] == [True, False]
    for meta_info in (first, last):
        assert meta_info["cached_tokens_details"] == {"device": 7, "host": 0, "chunk": 6}
        assert (meta_info["cached_tokens"], meta_info["cached_tokens"].chunk) == (7, 6)


@pytest.mark.parametrize("states", [{}, {"r": None}], ids=["removed", "another request has its id"])
def test_an_answer_that_comes_before_it_is_waited_for(states):
    """As to the first prompts of a batch whose last ones are still being tokenized."""

    async def scenario():
        answer, times = output({"type": "length"}), SimpleNamespace(response_sent_to_client_time=1)
        state = SimpleNamespace(event=asyncio.Event(), out_list=[answer], finished=True, time_stats=times)
        state.event.set()
        manager = TokenizerManager.__new__(TokenizerManager)
        manager.rid_to_state, manager.incremental_streaming_output = {"r": state}, False
        manager.request_logger = Mock()
        manager.request_metrics_exporter_manager = Mock(exporter_enabled=lambda: False)
        manager._handle_abort_finish_reason = AsyncMock(return_value=None)
        stream = report_chunks(inspect.unwrap(TokenizerManager._wait_one_response), manager, request())
        manager.rid_to_state = states
        assert [out async for out in stream] == [answer]

    asyncio.run(scenario())


def test_without_details_nothing_counts_as_a_hit():
    (last,) = collect(request(), output({"type": "stop"}))
    assert not any(chunk["hit"] for chunk in last["chunks"]) and last["cached_tokens"] == 0
    assert last["cached_tokens_details"] is None


def with_plan(plan):
    return plain_request(sampling_params={"custom_params": {LAYOUT_PARAM: plan.pack()}})


def with_link(link):
    return with_plan(Plan.of(PLAN.layout.chunks, get_policy(link), "salt"))


def test_the_link_of_prompts_with_chunks_is_reported():
    first, last = collect(with_link("full"), output(), output({"type": "stop"}, cached_tokens=3))
    assert "link" not in first and last["link"] == "full"
    assert "chunks" not in last and last["cached_tokens_details"] is None and type(last["cached_tokens"]) is int
    for link in ("block", "copy"):
        (last,) = collect(with_link(link), output({"type": "stop"}))
        assert last["link"] == link and len(last["chunks"]) == 2


def test_a_prompt_without_chunks_has_no_link():
    (last,) = collect(with_plan(Plan.salted("salt")), output({"type": "stop"}, cached_tokens=3))
    assert "link" not in last and "chunks" not in last


def test_ordinary_requests_are_untouched():
    out = output({"type": "stop"}, cached_tokens=3)
    (last,) = collect(plain_request(), out)
    assert last == {"finish_reason": {"type": "stop"}, "cached_tokens": 3, "cached_tokens_details": None}
    assert type(last["cached_tokens"]) is int


def samples_of(obj, n):
    """As SGLang makes them once the prompt has been checked."""
    own_plan(obj).report = SharedReport()
    return [copy.copy(obj) for _ in range(n)]


def test_samples_of_one_prompt_report_what_the_prompt_found():
    """For n > 1 SGLang computes the prompt first; that the samples then find it is no hit of the request."""
    first, *samples = samples_of(request(), 3)
    cold = output({"type": "length"}, cached_tokens_details={"device": 0, "host": 0, "chunk": 0, "chunk_hits": "0"})
    (prompt,) = collect(first, cold)
    details = {"device": 9, "host": 0, "chunk": 6, "chunk_hits": "3"}
    for obj in samples:
        warm = output({"type": "stop"}, cached_tokens=9, cached_tokens_details=dict(details))
        (sample,) = collect(obj, warm)
        for key in ("cached_tokens", "cached_tokens_details", "chunks"):
            assert sample[key] == prompt[key]
    assert sample["cached_tokens"] == 0 and not any(chunk["hit"] for chunk in sample["chunks"])


def test_prompts_with_the_same_parameters_share_no_report():
    """As those of a batch that only carry its salt."""
    one, other = request(), request()
    other.sampling_params = one.sampling_params
    for obj in (one, other):
        own_plan(obj).report = SharedReport()
    reports = [served(obj, PLAN).shared for obj in (one, copy.copy(one), other)]
    assert reports[0] is reports[1] is not reports[2] and reports[2] is not None


def test_every_prompt_is_remembered_once():
    """Samples, internal requests and ordinary prompts are not; prompts belong to their tenant, unless they have an
    extra_key."""
    manager = SimpleNamespace(rid_to_state={})

    def answer(obj, hits="1", num_reused=2):
        details = {"device": 0, "host": 0, "chunk": num_reused, "chunk_hits": hits}
        end = output({"type": "stop"}, cached_tokens=2, cached_tokens_details=details)
        collect(obj, output(cached_tokens_details=dict(details)), end, manager=manager)

    for obj in (*samples_of(request(), 2), request()):
        answer(obj)
    answer(request(log_metrics=False))
    answer(with_link("full"))
    answer(plain_request())
    usage, now = frontend_of(manager).usage, time.time()
    numbers = [sum(column) for column in zip(*usage.history(None, False, now), strict=True)][1:]
    assert numbers == [2, 4, 2, 2 * 6, 4]
    prompt = usage.last(None, False)[0]
    assert (prompt["link"], prompt["cache_salt"], prompt["num_chunks"]) == ("block", None, 2)
    expected = [
        {key: chunk[key] for key in ("id", "tokens", "hit")} for chunk in chunk_report(PLAN.layout, IDS, hits=1)
    ]
    assert prompt["chunks"] == expected and abs(prompt["time"] - now) < 60
    for extra_key, known in ((None, 1), ("more", 1)):
        obj = with_link("block")
        obj.extra_key = extra_key
        answer(obj)
        assert len(usage.last("salt", False)) == known
    assert len(usage.last(None, False)) == 2 and len(usage.last(None, True)) == 4


def test_a_refusal_by_the_scheduler_is_an_error_in_a_stream_too():
    refusal = {"type": "abort", "status_code": 400, "message": "the reason"}
    with pytest.raises(ValueError, match="the reason"):
        collect(request(), output(refusal))
    sample, _ = samples_of(request(is_single=False), 2)
    with pytest.raises(ValueError, match="the reason"):
        collect(sample, output(refusal))
    part_of_a_batch = request(is_single=False)
    assert collect(part_of_a_batch, output(refusal))[0]["finish_reason"] == refusal


@pytest.fixture(scope="module", autouse=True)
def _protocol():
    extend_protocol()
    extend_protocol()


@pytest.fixture
def usages(monkeypatch):
    """SGLang's usage of two prompts with two samples each, which found these counts: of an answer and of a stream."""
    stock = protocol.PromptTokensDetails.__init__

    def init(details, **counts):
        stock(details, **counts)
        usage_details(None, details, **counts)

    monkeypatch.setattr(protocol.PromptTokensDetails, "__init__", init)

    def usages(*counts):
        answers = [output(cached_tokens=count) for count in counts]
        none, cached = dict.fromkeys(range(len(counts)), 0), dict(enumerate(counts))
        found = UsageProcessor.calculate_response_usage(answers, n_choices=2, enable_cache_report=True)
        streamed = UsageProcessor.calculate_streaming_usage(
            none, none, none, cached_tokens=cached, n_choices=2, enable_cache_report=True
        )
        return [json.loads(usage.model_dump_json())["prompt_tokens_details"] for usage in (found, streamed)]

    return usages


def test_usage_counts_chunks_separately(usages):
    counts = CachedTokens(7, 6), CachedTokens(7, 6), CachedTokens(5, 0), CachedTokens(5, 0)
    assert usages(*counts) == [{"cached_tokens": 12, "chunk_tokens": 6}] * 2
    assert usages(CachedTokens(0, 0)) == [{"cached_tokens": 0, "chunk_tokens": 0}] * 2


def test_counts_survive_pickling():
    """As when an engine's user sends an answer to another process, or deep-copies it."""
    count = pickle.loads(pickle.dumps(CachedTokens(7, 6)))
    assert (count, count.chunk) == (7, 6)


def test_usage_of_ordinary_requests_keeps_its_shape(usages):
    assert usages(4) == [{"cached_tokens": 4}] * 2
    details = cached_tokens_details(protocol.CachedTokensDetails(device=4), {"device": 4, "host": 0})
    assert details.model_dump() == {"device": 4, "host": 0}


def test_sglext_counts_chunks_separately():
    details = cached_tokens_details(protocol.CachedTokensDetails(device=4), {"device": 4, "host": 0, "chunk": 3})
    extension = protocol.SglExt(cached_tokens_details=details)
    assert json.loads(extension.model_dump_json())["cached_tokens_details"] == {"device": 4, "host": 0, "chunk": 3}

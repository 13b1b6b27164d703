"""Shadow mode against a stand-in for SGLang: what is compared, what is counted, and that users have priority."""

import asyncio
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import AbortReq

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.segments import LAYOUT_PARAM
from sglang_lazy.policies import get_policy
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.port.serving.requests import plan_of, served
from sglang_lazy.port.serving.tokenizer_manager import (
    abort_with_all,
    make_idle,
    report_chunks,
)
from sglang_lazy.serving import agreement, shadow
from sglang_lazy.serving.agreement import ENOUGH, GAUGES, WINDOW, RecentAgreement
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.shadow import COUNTERS, Shadow

PLAN = Plan.of(((0, 2),), get_policy("block"), "tenant")
ANSWER = [7, 8, 9]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(shadow, "_QUIET_S", 0)


class Manager:
    """Holds a shadow request until `reply` is called or it is aborted."""

    def __init__(self):
        self.rid_to_state = {}
        self.is_pause = self.gracefully_exit = False
        self.preferred_sampling_params = None
        self.requests = []
        self.aborted = []
        self.arrived = asyncio.Event()

    async def generate_request(self, request):
        state = SimpleNamespace(abort_requested=False, result=asyncio.get_running_loop().create_future())
        self.requests.append(request)
        self.rid_to_state[request.rid] = state
        self.arrived.set()
        try:
            yield await state.result
        finally:
            del self.rid_to_state[request.rid]

    def _dispatch_to_scheduler(self, message):
        assert isinstance(message, AbortReq) and not message.abort_all
        self.aborted.append(message.rid)
        self.reply([], "abort", message.rid)

    async def next_request(self):
        await asyncio.wait_for(self.arrived.wait(), 5)
        self.arrived.clear()
        return self.requests[-1]

    def reply(self, output_ids, kind="stop", rid=None):
        out = {"output_ids": output_ids, "meta_info": {"finish_reason": {"type": kind, "message": kind}}}
        self.rid_to_state[rid or self.requests[-1].rid].result.set_result(out)

    async def get_internal_state(self):
        assert not self.rid_to_state


def user_request(plan=PLAN, **params):
    params = {"temperature": 0, "custom_params": {LAYOUT_PARAM: plan.pack(), "mine": 1}, **params}
    return SimpleNamespace(
        rid="user", input_ids=[1, 2, 3], sampling_params=params, extra_key="key", cache_salt="tenant",
        lora_path=None, lora_id=None, image_data=None, log_metrics=True,
        custom_logit_processor=None, require_reasoning=False, max_thinking_tokens=None,
    )  # fmt: skip


def offer(subject, request):
    subject.offer(served(request, plan_of(request)), ANSWER)


def run(scenario, rate=1.0):
    """Run `scenario(manager, shadow)` in an event loop; returns the counts afterwards."""

    async def play():
        manager, counts = Manager(), Counter()
        counters = {name: SimpleNamespace(inc=lambda name=name: counts.update([name])) for name in COUNTERS}
        recent = RecentAgreement(0, lambda name, value, **labels: None)
        frontend = frontend_of(manager)
        subject = frontend.shadow = Shadow(frontend.prompts, rate, counters, recent)
        await scenario(manager, subject)
        if subject.under_way:
            await asyncio.wait_for(subject._task, 5)
        return dict(counts)

    return asyncio.run(play())


@pytest.mark.parametrize(
    "tokens, agreements",
    [
        (ANSWER, {"identical_answers", "first_token_agreements"}),
        ([7, 8], {"first_token_agreements"}),
        ([6, 8, 9], set()),
    ],
)
def test_the_same_prompt_is_answered_in_full_and_compared(tokens, agreements):
    async def scenario(manager, subject):
        offer(subject, user_request(stop=["."]))
        request = await manager.next_request()
        # The salt is the request's own, not its layout's.
        assert plan_of(request) == Plan.of(PLAN.layout.chunks, get_policy("full")) and request.input_ids == [1, 2, 3]
        assert request.sampling_params["stop"] == ["."] and request.sampling_params["custom_params"]["mine"] == 1
        assert (
            (request.extra_key, request.cache_salt) == ("key", "tenant")
            and not request.stream
            and not request.log_metrics
        )
        manager.reply(tokens)

    assert run(scenario) == {"requests": 1, **dict.fromkeys(agreements, 1)}


def test_only_greedy_requests_are_eligible():
    async def scenario(manager, subject):
        for params in ({"temperature": 0.1}, {"temperature": 1, "top_k": 2}, {"n": 2}):
            offer(subject, user_request(**params))
        bare = user_request()
        del bare.sampling_params["temperature"]  # SGLang's default is 1
        offer(subject, bare)
        shown = user_request()
        shown.image_data = ["image"]
        offer(subject, shown)
        offer(subject, user_request(temperature=1, top_k=1))
        await manager.next_request()
        manager.reply(ANSWER)

    assert run(scenario) == {"ineligible": 5, "requests": 1, "identical_answers": 1, "first_token_agreements": 1}


def test_shadows_run_one_at_a_time():
    async def scenario(manager, subject):
        for _ in range(3):
            offer(subject, user_request())
        await manager.next_request()
        manager.reply([])
        await asyncio.wait([subject._task])
        assert len(manager.requests) == 1

    assert run(scenario) == {"dropped": 2, "requests": 1}


@pytest.mark.parametrize("rate, least, most", [(0.0, 0, 0), (0.25, 200, 300), (1.0, 1000, 1000)])
def test_the_sampled_fraction_is_deterministic(rate, least, most):
    async def scenario(manager, subject):
        chosen.append([])
        for index in range(1000):
            before = subject._task
            offer(subject, user_request())
            if subject._task is not before:
                subject._task.cancel()
                await asyncio.wait([subject._task])
                chosen[-1].append(index)

    chosen = []
    run(scenario, rate)
    run(scenario, rate)
    assert chosen[0] == chosen[1] and least <= len(chosen[0]) <= most


def test_a_shadow_waits_until_the_server_is_idle():
    async def scenario(manager, subject):
        manager.rid_to_state["other"] = SimpleNamespace()
        offer(subject, user_request())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not manager.requests
        del manager.rid_to_state["other"]
        await manager.next_request()
        manager.reply(ANSWER)

    assert run(scenario)["requests"] == 1


def test_a_shadow_yields_to_users_and_starts_over():
    async def scenario(manager, subject):
        offer(subject, user_request())
        first = await manager.next_request()
        subject.give_way(first.rid)  # the shadow's own arrival must not abort it
        assert not manager.aborted
        subject.give_way("another user")
        assert manager.aborted == [first.rid]
        second = await manager.next_request()
        assert second.rid != first.rid
        manager.reply(ANSWER)

    assert run(scenario) == {"requests": 1, "identical_answers": 1, "first_token_agreements": 1}


def test_aborting_all_requests_drops_the_shadow():
    async def scenario(manager, subject):
        for waiting in (True, False):
            if waiting:
                manager.rid_to_state["other"] = SimpleNamespace()
            offer(subject, user_request())
            if not waiting:
                await manager.next_request()
            abort_with_all(manager, "someone's")
            assert not subject._cancelled
            abort_with_all(manager, abort_all=True)
            if not waiting:
                manager.reply([], "abort")  # SGLang aborts it with the others
            await asyncio.wait_for(subject._task, 5)
            manager.rid_to_state.clear()
        assert len(manager.requests) == 1

    assert run(scenario) == {"dropped": 2}


def test_a_shadow_yields_to_calls_that_need_an_idle_server():
    async def flush(manager, timeout_s=None):
        assert not manager.rid_to_state
        return timeout_s

    async def scenario(manager, subject):
        assert await make_idle(flush, manager, timeout_s=1) == 1
        offer(subject, user_request())
        await manager.next_request()
        assert await make_idle(flush, manager, timeout_s=2) == 2

    assert run(scenario) == {"dropped": 1}


def test_no_shadow_starts_during_shutdown():
    async def scenario(manager, subject):
        manager.gracefully_exit = True
        offer(subject, user_request())

    assert run(scenario) == {"dropped": 1}


def test_errors_are_counted_and_logged(caplog):
    async def scenario(manager, subject):
        offer(subject, user_request())
        await manager.next_request()
        manager.reply([], "abort")

    assert run(scenario) == {"failed": 1}
    assert "a shadow of request user failed" in caplog.text


@pytest.mark.parametrize(
    "link, kind, output_ids, offered",
    [
        ("block", "length", [7, 8], True), ("copy", "stop", [7], True), ("block", "abort", [7], False),
        ("block", "length", [], False), ("full", "stop", [7], False),
    ],
)  # fmt: skip
def test_finished_answers_over_reused_chunks_are_offered(link, kind, output_ids, offered):
    """Whole answers are offered, though a stream's last output may hold only the end."""

    async def wait(manager, obj, request):
        for ids, finish_reason in ((output_ids[:1], None), (output_ids[1:], {"type": kind})):
            yield {"output_ids": ids, "meta_info": {"finish_reason": finish_reason}}

    async def scenario(manager, subject):
        subject.offer = lambda *arguments: seen.append(arguments)
        plan = Plan.of(PLAN.layout.chunks, get_policy(link))
        obj = user_request(plan)
        manager.rid_to_state[obj.rid] = SimpleNamespace(output_ids=output_ids)
        stream = report_chunks(wait, manager, obj)
        await anext(stream)
        assert not seen
        await anext(stream)
        assert [(one.request, one.plan, answer) for one, answer in seen] == (
            [(obj, plan, output_ids)] if offered else []
        )

    seen = []
    run(scenario)


# Recent agreement


class Gauges(dict):
    """The last value of each gauge by name and labels; unknown gauges are refused."""

    def __call__(self, name, value, **labels):
        assert set(labels) == set(GAUGES[name][1])
        self[(name, *labels.values())] = value


def test_agreement_is_over_the_latest_answers_of_each_link():
    gauges = Gauges()
    recent = RecentAgreement(0, gauges)
    for index in range(WINDOW):
        recent.add("block", answer=False, first_token=index % 2 == 0)
    recent.add("base", answer=True, first_token=True)
    assert gauges["agreement", "block", "answers"] == 0 and gauges["agreement", "block", "first_tokens"] == 0.5
    assert gauges["agreement", "base", "answers"] == gauges["agreement", "base", "first_tokens"] == 1
    for _ in range(WINDOW // 4):
        recent.add("block", answer=True, first_token=True)
    assert gauges["agreement", "block", "answers"] == 0.25 and gauges["agreement", "block", "first_tokens"] == 0.625
    assert gauges["alarm", "block"] == gauges["alarm", "base"] == 0  # no alarm without a minimum


def test_an_alarm_is_logged_once_and_clears(caplog):
    caplog.set_level(logging.WARNING, logger=RecentAgreement.__module__)  # an engine in this process may have raised it
    gauges = Gauges()
    recent = RecentAgreement(0.5, gauges)

    def add(count, same):
        for _ in range(count):
            recent.add("block", answer=same, first_token=True)
            recent.add("base", answer=True, first_token=False)
        assert gauges["alarm", "base"] == 0
        return gauges["alarm", "block"], len(caplog.records)

    assert add(ENOUGH - 1, False) == (0, 0)  # too few answers to judge
    assert add(1, False) == (1, 1)
    assert add(ENOUGH - 1, True) == (1, 1)
    assert add(1, True) == (0, 1)  # half of them agree
    assert add(5, False) == (1, 2)
    first, second = (record.getMessage() for record in caplog.records)
    assert f"link block, 0.000 of the last {ENOUGH} answers" in first and "less than --lazy-shadow-min-" in second


def test_the_number_of_metric_series_is_bounded(monkeypatch):
    monkeypatch.setattr(agreement, "_MAX_LINKS", 2)
    gauges = Gauges()
    recent = RecentAgreement(0, gauges)
    for link in ("block", "base", "epic:tokens=1", "block"):
        recent.add(link, answer=link == "block", first_token=True)
    assert {key[1] for key in gauges} == {"block", "base"}


def test_a_comparison_counts_for_its_link():
    async def scenario(manager, subject):
        subject.recent = SimpleNamespace(add=lambda *outcome: seen.append(outcome))
        for tokens in ([7, 8], ANSWER):
            offer(subject, user_request(Plan.of(PLAN.layout.chunks, get_policy("base"))))
            await manager.next_request()
            manager.reply(tokens)
            await asyncio.wait([subject._task])

    seen = []
    run(scenario)
    assert seen == [("base", False, True), ("base", True, True)]


# Refusals


@pytest.mark.parametrize("rate", [1.5, -0.1, float("nan")])
def test_bad_rates(rate):
    with pytest.raises(ValueError, match="shadow_rate must be between 0 and 1"):
        LazyConfig(shadow_rate=rate)


def test_bad_minimums():
    with pytest.raises(ValueError, match="shadow_min_agreement must be between 0 and 1"):
        LazyConfig(shadow_rate=0.1, shadow_min_agreement=90)
    with pytest.raises(ValueError, match="shadow_min_agreement watches what shadow mode compares, which is off"):
        LazyConfig(shadow_min_agreement=0.9)


def test_shadows_that_nobody_would_see_are_refused(monkeypatch):
    """In an engine and in servers without metrics; refused before any model is loaded."""
    from sglang_lazy import Engine, Runtime, launch_server
    from sglang_lazy.port import plugin

    monkeypatch.setattr(plugin, "activate", lambda config: None)
    monkeypatch.setattr("sglang.srt.plugins.load_plugins", lambda: None)
    args = SimpleNamespace(enable_metrics=False, tokenizer_worker_num=1)
    monkeypatch.setattr("sglang.srt.server_args.prepare_server_args", lambda argv: args)
    with pytest.raises(ValueError, match="for an engine there is sglang_lazy.verify"):
        Engine(model_path="m", lazy_shadow_rate=0.1, enable_metrics=True)
    with pytest.raises(ValueError, match="add --enable-metrics"):
        Runtime(model_path="m", lazy_shadow_rate=0.1)
    for metrics, workers, reason in ((False, 1, "publishes its result as metrics"), (True, 2, "needs one tokenizer")):
        args.enable_metrics, args.tokenizer_worker_num = metrics, workers
        with pytest.raises(SystemExit) as ended:
            launch_server.main(["--model-path", "m", "--lazy-shadow-rate", "0.1"])
        assert str(ended.value.code).startswith(f"error: --lazy-shadow-rate {reason}")

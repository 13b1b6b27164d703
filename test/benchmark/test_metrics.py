"""Metrics computed from hand-made timelines, and how conversations are sent."""

import asyncio
import dataclasses
import math
import types

import pytest

from benchmark.serving import load, metrics
from benchmark.serving.client import Timeline
from benchmark.serving.decode_speed import decode_rate
from benchmark.serving.metrics import ServerGauges, is_saturated, sglang_output, summarise
from benchmark.serving.prompts import as_chunks, chunk, text
from benchmark.serving.workloads import Turn


def timeline(sent: float, *arrivals: tuple[float, int], prompt=100, cached=0, chunks=0) -> Timeline:
    return Timeline(sent, list(arrivals), list(range(arrivals[-1][1])), prompt, cached, chunks)


def test_one_request():
    """Sent at 10 s; tokens at 10.5, 10.7, and two at 11.1. An event of two tokens counts as two equal intervals."""
    request = timeline(10, (10.5, 1), (10.7, 2), (11.1, 4), prompt=60, cached=45, chunks=30)
    assert sglang_output(request).itl == pytest.approx([0.2, 0.2, 0.2])
    found = summarise([[request]])
    for statistic in ("mean", "p50", "p90", "p99"):
        assert found[f"ttft_ms_{statistic}"] == pytest.approx(500)
        assert found[f"e2e_ms_{statistic}"] == pytest.approx(1100)
        assert found[f"tpot_ms_{statistic}"] == pytest.approx(200)  # 600 ms for 3 tokens
        assert found[f"itl_ms_{statistic}"] == pytest.approx(200)
    assert found["duration_s"] == pytest.approx(1.1)
    assert found["output_throughput"] == pytest.approx(4 / 1.1, abs=1e-3)
    assert found["total_throughput"] == pytest.approx(64 / 1.1, abs=1e-3)
    assert found["request_throughput"] == pytest.approx(1 / 1.1, abs=1e-3)
    assert (found["prompt_tokens"], found["output_tokens"]) == (60, 4)
    assert (found["hit_rate"], found["chunk_hit_rate"]) == (0.75, 0.5)


def test_percentiles():
    """100 requests with TTFT 10, 20, … 1000 ms: percentiles interpolate linearly."""
    requests = [timeline(n, (n + 0.01 * (n + 1), 1)) for n in range(100)]
    found = summarise([requests])
    assert found["ttft_ms_mean"] == pytest.approx(505)
    assert found["ttft_ms_p50"] == pytest.approx(505)
    assert found["ttft_ms_p90"] == pytest.approx(901)
    assert found["ttft_ms_p99"] == pytest.approx(990.1)
    assert found["tpot_ms_mean"] == 0, "a single token has no interval"


def test_stages_add_up():
    """Four seconds of requests in stages an hour apart: the time between stages does not count."""
    stages = [[timeline(0, (0.5, 1), (1, 2))], [timeline(3600, (3600.25, 1), (3603, 2))]]
    found = summarise(stages)
    assert found["duration_s"] == 4
    assert found["request_throughput"] == 0.5
    assert found["ttft_ms_stages"] == [500, 250]
    assert found["duration_s_stages"] == [1, 3]


def test_turns_have_medians_of_their_own():
    """Two conversations, the second of which ends after a turn."""
    first = [dataclasses.replace(timeline(n, (n + wait, 1)), turn=n) for n, wait in ((1, 0.3), (2, 0.1))]
    assert summarise([first, [timeline(9, (9.5, 1))]])["ttft_ms_turns"] == [400, 100]


def test_hit_rates_count_tokens():
    """A long prompt weighs more than a short one."""
    found = summarise([[timeline(0, (1, 1), prompt=900, cached=900), timeline(0, (1, 1), prompt=100)]])
    assert found["hit_rate"] == 0.9


def test_saturation():
    """Saturated means a queue that remains after the last send; one slow answer is not enough."""
    keeping_up = [timeline(n, (n + 0.5, 1), (n + 2, 2)) for n in range(10)]
    assert not is_saturated(keeping_up)
    falling_behind = [timeline(n, (2 * n + 0.5, 1), (2 * n + 2, 2)) for n in range(10)]
    assert is_saturated(falling_behind)
    assert not is_saturated(keeping_up[:1])


def test_decode_rate():
    """From the second request's first token to the first request's last: rates of 10 and 20 tokens per second add
    up."""
    first = timeline(0, *((0.1 * n, n + 1) for n in range(11)))  # its last token is at 1.0
    second = timeline(0, *((0.5 + 0.05 * n, n + 1) for n in range(31)))
    rate, window = decode_rate([first, second])
    assert rate == pytest.approx(30)
    assert window == pytest.approx(0.5)
    with pytest.raises(ValueError, match="did not decode together"):
        decode_rate([first, timeline(0, (2, 1), (3, 2))])


def test_server_gauges(monkeypatch):
    """Samples are summed over labels; token counts are those since the previous query."""
    cached, prompt, free = "sglang:cached_tokens_total", "sglang:prompt_tokens_total", "sglang:kv_available_tokens"
    pages = iter(
        (
            f'{cached}{{source="device"}} 10.0\n{prompt}{{s="a"}} 100.0\n',
            f'{cached}{{source="device"}} 40.0\n{cached}{{source="host"}} 10\n'
            f'{prompt}{{s="a"}} 150.0\n{prompt}{{s="b"}} 5e1\n',
            f'{cached}{{source="device"}} 50.0\n{prompt}{{s="a"}} 200.0\n',
            f"# HELP {free} Free slots.\n{free} 300.0\n",
        )
    )

    def get(url, timeout):
        if url.endswith("/server_info"):
            return types.SimpleNamespace(json=lambda: {"max_total_num_tokens": 1000})
        return types.SimpleNamespace(text=next(pages))

    monkeypatch.setattr(metrics.requests, "get", get)
    gauges = ServerGauges("http://server")
    assert gauges.new_tokens() == {"cached": 40, "prompt": 100}
    assert gauges.new_tokens() == {"cached": 0, "prompt": 0}
    assert gauges.resident_tokens() == 700


@pytest.fixture
def fake_server(monkeypatch):
    """Answers every request with its prompt's length as the only token; records prompts and the peak concurrency."""
    seen = types.SimpleNamespace(prompts=[], most=0, now=0)

    async def stream(session, url, prompt):
        seen.prompts.append(prompt)
        seen.now += 1
        seen.most = max(seen.most, seen.now)
        await asyncio.sleep(0.01)
        seen.now -= 1
        return Timeline(0, [(1, 1)], [len(prompt)], 1, 0, 0)

    monkeypatch.setattr(load, "stream", stream)
    monkeypatch.setattr(load, "encode", lambda prompt, output_len: list(prompt["segments"]))
    return seen


def test_conversations_grow(fake_server):
    """A turn's prompt is all earlier turns, each with its answer, and the new question."""
    turns = [Turn([text([1]), chunk([2])], 1), Turn([text([3])], 1), Turn([chunk([2]), text([4])], 1)]
    timelines = load.send("url", [turns], as_chunks, request_rate=math.inf, max_concurrency=None, seed=0)
    assert [timeline.turn for timeline in timelines] == [1, 2, 3]
    first = [text([1]), chunk([2])]
    second = [*first, text([2]), text([3])]
    third = [*second, text([4]), chunk([2]), text([4])]
    assert fake_server.prompts == [first, second, third]


@pytest.mark.parametrize("limit, most", [(2, 2), (None, 6)])
def test_max_concurrency(fake_server, limit, most):
    conversations = [[Turn([text([n])], 1)] for n in range(6)]
    load.send("url", conversations, as_chunks, request_rate=math.inf, max_concurrency=limit, seed=0)
    assert fake_server.most == most

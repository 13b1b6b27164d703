"""Shadow mode: a server in service that compares both ways of answering."""

import collections
import time

import pytest
import requests
from http_prompts import GREEDY, SEGMENTS, call, generate, ids, random_prompt

from sglang_lazy.testing import device_flags, running_server

pytestmark = pytest.mark.slow  # starts a server


@pytest.fixture(scope="module")
def shadowing(tiny_model, tmp_path_factory):
    """URL of a server that repeats every greedy answer over chunks under link full, its default link."""
    flags = ["--model-path", tiny_model, "--max-total-tokens", "20000", *device_flags()]
    flags += ["--enable-metrics", "--lazy-shadow-rate", "1", "--lazy-default-link", "full"]
    flags += ["--lazy-shadow-min-agreement", "0.9"]
    with running_server(flags, tmp_path_factory.mktemp("shadow") / "server.log") as url:
        yield url


def metrics(url):
    """Values by name, without labels; series of the same name are summed."""
    values = collections.Counter()
    for line in requests.get(url + "/metrics", timeout=60).text.splitlines():
        if not line.startswith("#"):
            values[line.split("{")[0].split(" ")[0]] += float(line.rsplit(" ", 1)[1])
    return values


def shadows(url):
    return {
        name.removeprefix("sglang_lazy:shadow_").removesuffix("_total"): int(value)
        for name, value in metrics(url).items()
        if name.startswith("sglang_lazy:shadow_") and name.endswith("_total")
    }


def gauge(url, name, *labels):
    """The value of the single series of a gauge with these labels."""
    lines = requests.get(url + "/metrics", timeout=60).text.splitlines()
    (value,) = (
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith(f"sglang_lazy:shadow_{name}{{") and all(label in line for label in labels)
    )
    return value


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.05)


def running(url):
    return requests.get(url + "/v1/loads", timeout=60).json()["loads"][0]["num_running_reqs"]


def test_default_link_and_shadows(shadowing):
    """With nothing before the only chunk, block equals full; otherwise they differ."""
    same = [[ids("chunk", *range(20, 20 + n)), ids("text", 30, 31, n)] for n in (4, 9)]
    others = [random_prompt(seed)[0] for seed in range(4)]
    full = [generate(shadowing, segments=segments) for segments in same + others]
    assert {answer["meta_info"]["link"] for answer in full} == {"full"}
    assert set(shadows(shadowing).values()) == {0}
    users = metrics(shadowing)["sglang:num_requests_total"]
    expected = {"requests": 0, "identical_answers": 0, "first_token_agreements": 0, "dropped": 0, "failed": 0}
    expected["ineligible"] = 0
    for segments, other in zip(same + others, full, strict=True):
        answer = generate(shadowing, segments=segments, link="block")
        assert answer["meta_info"]["link"] == "block"
        expected["requests"] += 1
        expected["identical_answers"] += answer["output_ids"] == other["output_ids"]
        expected["first_token_agreements"] += answer["output_ids"][0] == other["output_ids"][0]
        wait_until(lambda: shadows(shadowing)["requests"] == expected["requests"])
    assert shadows(shadowing) == expected
    assert 2 <= expected["identical_answers"] < 6, "both outcomes must occur for this test to see anything"
    assert metrics(shadowing)["sglang:num_requests_total"] == users + 6  # shadows do not count as requests
    for of, count in (("answers", "identical_answers"), ("first_tokens", "first_token_agreements")):
        assert gauge(shadowing, "agreement", 'link="block"', f'of="{of}"') == pytest.approx(expected[count] / 6)
    assert gauge(shadowing, "alarm", 'link="block"') == 0  # too few comparisons for an alarm


def test_which_answers_are_shadowed(shadowing):
    before = shadows(shadowing)
    sampled = {**GREEDY, "temperature": 1}
    generate(shadowing, segments=SEGMENTS, link="block", sampling_params=sampled)
    generate(shadowing, segments=SEGMENTS, link="block", sampling_params={**GREEDY, "n": 2})
    generate(shadowing, text="Which town?")
    wait_until(lambda: shadows(shadowing)["ineligible"] == before["ineligible"] + 3)
    body = {"segments": SEGMENTS, "link": "block", "stream": True, "sampling_params": GREEDY}
    stream = requests.post(shadowing + "/generate", json=body, timeout=120)
    assert stream.text.rstrip().endswith("[DONE]") and "lazy-shadow" not in stream.text
    wait_until(lambda: shadows(shadowing)["requests"] == before["requests"] + 1)
    messages = [{"role": "user", "content": SEGMENTS}]
    fields = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 4, "link": "block"}
    reply = call(shadowing, "/v1/chat/completions", **fields)
    assert reply["usage"]["completion_tokens"] <= 4 and len(reply["choices"]) == 1
    wait_until(lambda: shadows(shadowing)["requests"] == before["requests"] + 2)
    generate(shadowing, segments=[SEGMENTS] * 3, link="block")  # of answers that end together, one is compared
    wait_until(lambda: shadows(shadowing)["requests"] == before["requests"] + 3)
    assert shadows(shadowing)["dropped"] == before["dropped"] + 2
    assert shadows(shadowing)["failed"] == 0


def test_users_and_operators_come_first(shadowing, tiny_model):
    """While a shadow runs, requests are answered as usual, and calls that need an idle server succeed.

    The shadow is long enough to be running still when the call arrives, on a busy machine, too.
    """
    long = {"segments": SEGMENTS, "link": "block", "sampling_params": {**GREEDY, "max_new_tokens": 1500}}
    expected = generate(shadowing, segments=SEGMENTS)["output_ids"]
    before = shadows(shadowing)
    answer = generate(shadowing, **long)["output_ids"]
    wait_until(lambda: running(shadowing) == 1)
    assert generate(shadowing, segments=SEGMENTS)["output_ids"] == expected
    wait_until(lambda: running(shadowing) == 1)  # it started over
    controls = [("/flush_cache", {}), ("/update_weights_from_disk", {"model_path": tiny_model})]
    for count, (path, body) in enumerate([*controls, ("/abort_request", {"abort_all": True})], 1):
        response = requests.post(shadowing + path, json=body, timeout=120)
        assert response.status_code == 200, response.text
        wait_until(lambda expected=before["dropped"] + count: shadows(shadowing)["dropped"] == expected)
        assert shadows(shadowing) == {**before, "dropped": before["dropped"] + count}
        again = generate(shadowing, segments=SEGMENTS)
        assert again["output_ids"] == expected and (path == "/abort_request" or not again["meta_info"]["cached_tokens"])
        if count < 3:
            assert generate(shadowing, **long)["output_ids"] == answer
            wait_until(lambda: running(shadowing) == 1)

"""Thousands of requests, most of them malformed, to every route but those that need an admin key.

None may be answered with a 500, break its connection, hang, or end the server. Routes, fields and their types come from
the server's own schema.
"""

import json
import os
from collections import Counter

import pytest
import requests
from fuzz_bodies import KNOWN_CHUNKS, MODEL, Sent, fields_of, others_of, requests_of
from hypothesis import HealthCheck, Phase, given, settings
from sglang.srt.entrypoints import http_server

from oracle.block_mask import Oracle, greedy
from oracle.scenarios import Dice
from sglang_lazy.testing import device_flags, log_tail, running_server

pytestmark = pytest.mark.slow  # starts a server

NUM_REQUESTS = int(os.environ.get("LAZY_FUZZ_REQUESTS", "1000"))
PATIENCE = 60  # seconds


class Broken(AssertionError):
    """An answer that no request may get."""


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    log = tmp_path_factory.mktemp("fuzz") / "server.log"
    # A short context, so that nothing takes long.
    flags = ["--model-path", tiny_model, "--served-model-name", MODEL, "--context-length", "256"]
    flags += ["--max-total-tokens", "600", "--chunked-prefill-size", "64", "--lazy-max-chunks", "8", *device_flags()]
    with running_server([*flags, "--enable-cache-report"], log) as url:
        body = {"chunks": [{"input_ids": list(known.ids)} for known in KNOWN_CHUNKS], "wait": True}
        assert requests.post(f"{url}/chunks", json=body, timeout=PATIENCE).ok
        yield url, log


def send(url: str, request: Sent) -> tuple[int, str]:
    """Returns status and body, including a stream's."""
    headers = {"Content-Type": "application/json", **dict(request.headers)}
    headers = {name: value.encode() for name, value in headers.items()}
    answer = requests.request(request.method, url + request.path, data=request.data, headers=headers, timeout=PATIENCE)
    return answer.status_code, answer.text


def failure(status: int, text: str) -> str | None:
    """What is wrong with an answer, or None. In a stream an event may say it."""
    if status >= 500:
        return text
    for line in text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            error = event.get("error") or {}
            code = error.get("code") if isinstance(error, dict) else None
            if isinstance(code, int) and code >= 500:
                return line
    return None


def operator_s() -> set[str]:
    """The paths that SGLang guards with the admin key: they pause the server, change its weights, write files."""
    routes = http_server.app.router.routes
    return {route.path for route in routes if hasattr(getattr(route, "endpoint", None), "_auth_level")}


def check_answers(url: str, oracle: Oracle) -> None:
    """A prompt with chunks is still answered rightly."""
    dice = Dice("fuzz")
    prompt = [dice.text(3), KNOWN_CHUNKS[0], dice.text(5)]
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"segments": [segment.to_request() for segment in prompt], "sampling_params": params}
    tokens = requests.post(f"{url}/generate", json=body, timeout=PATIENCE).json()["output_ids"]
    assert len(tokens) == 4 and greedy(oracle.logprobs(prompt, tokens[:-1])) == tokens


def test_no_request_harms_the_server(server, tiny_model):
    url, log = server
    oracle = Oracle(tiny_model)
    check_answers(url, oracle)
    api = requests.get(f"{url}/openapi.json", timeout=PATIENCE).json()
    fields, others = fields_of(api), others_of(api, operator_s())
    assert len(others) > 30
    counts: Counter[str] = Counter()

    @settings(
        max_examples=NUM_REQUESTS,
        derandomize="LAZY_FUZZ_REQUESTS" not in os.environ,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # after the server has ended, shrinking would blame any request
        suppress_health_check=list(HealthCheck),
    )
    @given(requests_of(fields, others))
    def harmless(request):
        try:
            status, text = send(url, request)
            wrong = failure(status, text)
        except requests.RequestException as error:
            raise Broken(f"{request}: {error!r}\n{log_tail(log)}") from None
        counts[f"{request.method} {request.route} {status}"] += 1
        if wrong is not None:
            raise Broken(f"{request}: {wrong}\n{log_tail(log)}")

    harmless()
    print(f"{counts.total()} requests:", *(f"  {count:5} {name}" for name, count in sorted(counts.items())), sep="\n")
    # An idle server checks its accounting, and a leaked slot or lock ends it.
    assert requests.post(f"{url}/flush_cache?timeout=30", timeout=PATIENCE).ok, log_tail(log)
    check_answers(url, oracle)

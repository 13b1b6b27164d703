"""On a running server, text that one tenant has cached is found by nobody else, whatever key they send."""

import uuid

import pytest
import requests
from http_prompts import chunk, text

TEXT = "The lock keeper wrote down every barge, its cargo and its depth, in a book that nobody else could read. " * 2
USER = [{"role": "user", "content": TEXT}]
PARAMS = {"sampling_params": {"temperature": 0, "max_new_tokens": 1}}
OPENAI = {"model": "default", "temperature": 0, "max_tokens": 1}
OLLAMA = {"model": "m", "stream": False, "options": {"num_predict": 1}}

ROUTES = {
    "/generate": {"text": TEXT, **PARAMS},
    "/generate with segments": {"segments": [text(TEXT), chunk("x")], **PARAMS},
    "/v1/completions": {**OPENAI, "prompt": TEXT},
    "/v1/completions with segments": {**OPENAI, "segments": [text(TEXT), chunk("x")]},
    "/v1/chat/completions": {**OPENAI, "messages": USER},
    "/invocations": {**OPENAI, "messages": USER},
    "/vertex_generate": {"instances": [{"text": TEXT}], "parameters": PARAMS},
}
"""Routes that report how much was cached."""


def cached(server, route, salt, extra_key=None):
    """How many tokens of the prompt were found, less those of the chunk."""
    body = dict(ROUTES[route])
    if extra_key is not None:
        if route == "/vertex_generate":
            body["parameters"] = {**PARAMS, "extra_key": extra_key}
        else:
            body["extra_key"] = extra_key
    headers = {} if salt is None else {"X-Cache-Salt": salt}
    answer = requests.post(server + route.partition(" ")[0], json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    answer = answer.json()
    if "predictions" in answer:
        (answer,) = answer["predictions"]
    if "usage" in answer:
        details = answer["usage"]["prompt_tokens_details"] or {}
        return details.get("cached_tokens", 0) - details.get("chunk_tokens", 0)
    meta = answer["meta_info"]
    return meta["cached_tokens"] - ((meta["cached_tokens_details"] or {}).get("chunk") or 0)


@pytest.mark.parametrize("route", ROUTES)
def test_salt_and_key_are_kept_apart(server, route):
    name = uuid.uuid4().hex[:8]  # of nobody yet
    assert cached(server, route, f"{name}0") <= 1
    others = [(name, "0"), (name, None), (None, f"{name}0"), (None, f'["{name}0",null]'), (f"{name}0", "0")]
    for salt, key in others:
        assert cached(server, route, salt, key) <= 1, (salt, key)
    for salt, key in ((f"{name}0", None), *others):
        assert cached(server, route, salt, key) > 20, "each finds its own"


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "/vertex_generate"])
def test_the_body_s_salt_is_the_header_s(server, route):
    name = uuid.uuid4().hex[:8]
    answer = requests.post(server + route.partition(" ")[0], json={**ROUTES[route], "cache_salt": name}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert cached(server, route, f"{name}0") <= 1 and cached(server, route, None, name) <= 1
    assert cached(server, route, name) > 20


def test_the_header_holds_on_routes_that_report_nothing(server):
    """Ollama's: what it has cached is found by the same salt only."""
    name = uuid.uuid4().hex[:8]
    answer = requests.post(
        f"{server}/api/generate", json={**OLLAMA, "prompt": TEXT}, headers={"X-Cache-Salt": name}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    assert cached(server, "/generate", f"{name}0") <= 1
    assert cached(server, "/generate", name) > 20


def test_a_bad_header_does_not_make_a_server_unhealthy(server):
    for headers in ({"X-Cache-Salt": "\xe9".encode("latin-1")}, {"X-Cache-Salt": ""}):
        assert requests.get(server + "/health_generate", headers=headers, timeout=60).status_code == 200

"""Requests that are too large: refused, without making other clients wait."""

import contextlib
import re
import threading
import time

import pytest
import requests

MANY = 100_000
PATIENCE = 120
MOST = 2.0
"""Seconds that another client may wait, on a busy machine; most of these requests once took ten times as many."""
PARTS = [{"type": "chunk", "text": "a"}] * MANY
DOCUMENTS = [{"type": "document", "source": {"type": "text", "data": "a"}}] * MANY
DIVIDED = "a#" * 2_000_000
LONG = "What is a lazy river? " * 100_000
ONE = {"sampling_params": {"max_new_tokens": 1}}
MODEL = {"model": "default", "max_tokens": 1}
TOO_MANY, TOO_LONG = "at most 256 chunks|the 256 chunks", "context length"


def chat(content, **fields):
    return {**MODEL, "messages": [{"role": "user", "content": content}], **fields}


def divided(body):
    return {**body, "chunk_separator": "#"}


CASES = {
    "segments": ("/generate", {"segments": PARTS, **ONE}, TOO_MANY),
    "divided text": ("/generate", divided({"text": DIVIDED, **ONE}), TOO_MANY),
    "segments of a completion": ("/v1/completions", {**MODEL, "segments": PARTS}, TOO_MANY),
    "a divided completion": ("/v1/completions", divided({**MODEL, "prompt": DIVIDED}), TOO_MANY),
    "chat parts": ("/v1/chat/completions", chat(PARTS), TOO_MANY),
    "a divided chat": ("/v1/chat/completions", divided(chat(DIVIDED)), TOO_MANY),
    "divided chat parts": ("/v1/chat/completions", divided(chat([{"type": "text", "text": "#a#"}] * MANY)), TOO_MANY),
    "roles": (
        "/v1/chat/completions",
        {**MODEL, "messages": [{"role": "user", "content": "a"}] * MANY, "chunk_roles": ["user"] * MANY},
        TOO_MANY,
    ),
    "parts of a message": ("/v1/messages", chat(PARTS), TOO_MANY),
    "documents": ("/v1/messages", chat(DOCUMENTS), TOO_MANY),
    "parts of an input": (
        "/v1/responses",
        {"model": "default", "input": [{"role": "user", "content": PARTS}]},
        TOO_MANY,
    ),
    "a divided input": ("/v1/responses", divided({"model": "default", "input": DIVIDED}), TOO_MANY),
    "a divided text under full": ("/generate", divided({"text": DIVIDED, "link": "full", **ONE}), TOO_LONG),
    "a divided chat under full": ("/v1/chat/completions", divided(chat(DIVIDED, link="full")), TOO_LONG),
    "registered chunks": ("/chunks", {"chunks": [f"{i}{LONG}" for i in range(2)]}, None),
    "token ids": ("/generate", {"input_ids": [5] * 1_000_000, **ONE}, TOO_LONG),
    "a batch": ("/generate", {"text": [LONG[:20_000]] * 200, **ONE}, TOO_LONG),
    "a batch of segments": (
        "/v1/completions",
        {**MODEL, "segments": [[{"type": "chunk", "text": LONG[:20_000]}, "a"]] * 200},
        TOO_LONG,
    ),
    "a long text": ("/generate", {"text": LONG, **ONE}, TOO_LONG),
    "a long segment": ("/generate", {"segments": [{"type": "chunk", "text": LONG}, "a"], **ONE}, TOO_LONG),
    "a long completion": ("/v1/completions", {**MODEL, "prompt": LONG}, TOO_LONG),
    "a long chat": ("/v1/chat/completions", chat(LONG), TOO_LONG),
    "a long chat with a chunk": ("/v1/chat/completions", chat([*PARTS[:1], {"type": "text", "text": LONG}]), TOO_LONG),
    "a long input": ("/v1/responses", {"model": "default", "input": LONG}, TOO_LONG),
}


@contextlib.contextmanager
def another_client(url):
    """The seconds that another client waits for each of its answers meanwhile."""
    waits, ended = [], threading.Event()

    def ask():
        with requests.Session() as session:
            while not ended.is_set():
                start = time.monotonic()
                session.get(f"{url}/lazy_info", timeout=PATIENCE).raise_for_status()
                waits.append(time.monotonic() - start)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("case", CASES)
def test_nobody_waits_for_a_large_request(server, case, record_property):
    route, body, reason = CASES[case]
    with another_client(server) as waits:
        answer = requests.post(f"{server}{route}", json=body, timeout=PATIENCE)
    record_property("longest wait", max(waits))
    print(case, answer.status_code, answer.text[:150], f"{max(waits):.3f}")
    assert answer.status_code == (202 if reason is None else 400) and len(answer.content) < 2000, answer.text[:2000]
    assert reason is None or re.search(reason, answer.text), answer.text
    assert max(waits) < MOST

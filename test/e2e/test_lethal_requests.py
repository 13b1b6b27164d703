"""Requests that have ended a server, or made others wait, through every route that takes them.

None may end a process, keep memory, or delay the short prompts that another client sends all the while.
LAZY_LETHAL_ROUNDS repeats them, each round with other values, for the memory to show what adds up.
"""

import contextlib
import dataclasses
import http.client
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
import requests
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from oracle.adapters import random_adapter
from sglang_lazy.serving.fields import INTERNAL_PARAMS, SERVER_FIELDS
from sglang_lazy.testing import device_flags, log_tail, running_server

pytestmark = pytest.mark.slow  # starts a server

ROUNDS = max(2, int(os.environ.get("LAZY_LETHAL_ROUNDS", "2")))
NUM_PARTS = 100_000 if ROUNDS == 2 else 500_000  # JSON of that size alone takes most of a second to read
PATIENCE = 60  # seconds
KEPT = 64 << 20
"""Bytes that a round may leave: allocators and caches of bounded size."""
DOCUMENT = "The lock keeper had one key for all four gates."
ADMIN = {"Authorization": "Bearer admin"}


class Sent(NamedTuple):
    """A request.  refused: whether it must be; others may also be served with values that were converted."""

    path: str
    body: Any
    refused: bool = True
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = ()


# Prompts, in the form of each route

PARAMS = {"max_new_tokens": 2, "temperature": 0}
SEGMENTS = [{"type": "text", "text": "Read: "}, {"type": "chunk", "text": DOCUMENT}, {"type": "text", "text": " Who?"}]
PARTS = [{"role": "user", "content": SEGMENTS}]
USER = [{"role": "user", "content": "Who?"}]
COMPLETION = {"model": "m", "max_tokens": 4}
NATIVE = {
    "/generate": {"text": "Who?"},
    "/generate ": {"text": ["Who?", "Where?"]},
    "/generate  ": {"segments": SEGMENTS},
    "/generate   ": {"text": "Who?", "stream": True, "return_logprob": True},
}
"""Bodies of SGLang's own route, without sampling parameters. (Spaces tell the keys apart.)"""
CHUNKED = {
    "/generate": {"segments": SEGMENTS},
    "/v1/completions": {**COMPLETION, "segments": SEGMENTS},
    "/v1/chat/completions": {**COMPLETION, "messages": PARTS},
    "/invocations": {**COMPLETION, "messages": PARTS},
    "/v1/responses": {"model": "m", "max_output_tokens": 4, "input": PARTS},
    "/v1/messages": {**COMPLETION, "messages": PARTS},
}
"""Prompts with a chunk, by route."""
PLAIN = {
    "/generate": {"text": "Who?"},
    "/v1/completions": {**COMPLETION, "prompt": "Who?"},
    "/v1/chat/completions": {**COMPLETION, "messages": USER},
    "/invocations": {**COMPLETION, "messages": USER},
    "/v1/responses": {"model": "m", "max_output_tokens": 4, "input": "Who?"},
    "/v1/messages": {**COMPLETION, "messages": USER},
    "/v1/messages/count_tokens": {"model": "m", "messages": USER},
    "/api/generate": {"model": "m", "prompt": "Who?", "stream": False},
    "/api/chat": {"model": "m", "messages": USER, "stream": False},
    "/vertex_generate": {"instances": [{"text": "Who?"}]},
    "/encode": {"text": "Who?"},
    "/classify": {"text": "Who?"},
    "/v1/embeddings": {"model": "m", "input": "Who?"},
    "/v1/classify": {"model": "m", "input": "Who?"},
    "/v1/score": {"model": "m", "query": "Who?", "items": ["a"], "label_token_ids": [5]},
    "/v1/rerank": {"query": "Who?", "documents": ["a"]},
    "/v1/tokenize": {"model": "m", "prompt": "Who?"},
}
"""Every route that reads a prompt."""
SALTED = ["/generate", "/v1/completions", "/v1/chat/completions", "/invocations", "/v1/responses", "/v1/messages"]
OPENAI_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
OLLAMA_NAMES = {"max_new_tokens": "num_predict", "sampling_seed": "seed"}
WRONG = [16.0, 0, True, "16", 2**63, [1.0], {"a": 1}, 1.5, 2**31, -1, float("nan"), 2**70, [], "", [None], "\ud800"]
"""Values of every type; each field gets some of them in every round."""


def sampling(name: str, value: Any) -> Iterator[Sent]:
    """A sampling parameter, on every route that has it."""
    params = {"sampling_params": {**PARAMS, name: value}}
    for path, body in NATIVE.items():
        yield Sent(path.strip(), {**body, **params}, refused=False)
    yield Sent("/vertex_generate", {**PLAIN["/vertex_generate"], "parameters": params}, refused=False)
    for path in SALTED[1:]:
        for body in (PLAIN[path], CHUNKED[path]):
            yield Sent(path, {**body, OPENAI_NAMES.get(name, name): value}, refused=False)
    for path in ("/api/generate", "/api/chat"):
        options = {"num_predict": 2, OLLAMA_NAMES.get(name, name): value}
        yield Sent(path, {**PLAIN[path], "options": options}, refused=False)


def field(name: str, value: Any) -> Iterator[Sent]:
    """A field of SGLang's request, on every route that has it."""
    for path, body in NATIVE.items():
        yield Sent(path.strip(), {"sampling_params": PARAMS, **body, name: value}, refused=False)
    fields = {"sampling_params": PARAMS, name: value}
    yield Sent("/vertex_generate", {**PLAIN["/vertex_generate"], "parameters": fields}, refused=False)
    for path in ("/encode", "/classify", "/v1/completions", "/v1/chat/completions"):
        yield Sent(path, {**PLAIN[path], name: value}, refused=False)


def session(name: str, value: Any, opened: str) -> Iterator[Sent]:
    """A parameter of a turn in an open session."""
    params = {"id": opened, name: value}
    yield Sent("/generate", {"text": "Who?", "sampling_params": PARAMS, "session_params": params}, refused=False)
    yield Sent("/v1/completions", {**PLAIN["/v1/completions"], "session_params": params}, refused=False)


def wrong_types(number: int, opened: str) -> Iterator[Sent]:
    """The two that ended servers, and every field. A round takes half of the routes of each field."""

    def half(of_all_routes: Iterator[Sent]) -> Iterator[Sent]:
        return itertools.islice(of_all_routes, number % 2, None, 2)

    yield from sampling("max_new_tokens", 16.0)
    yield from sampling("skip_special_tokens", 0)
    values = itertools.cycle(WRONG[number % len(WRONG) :] + WRONG[: number % len(WRONG)])
    for one in msgspec.structs.fields(SamplingParams):
        yield from half(sampling(one.name, next(values)))
    for one in dataclasses.fields(GenerateReqInput):
        if one.name not in ("text", "stream", "sampling_params"):
            yield from half(field(one.name, next(values)))
    for value in WRONG:  # Vertex AI's prompts, of which SGLang checks no type
        for name in ("text", "input_ids", "input_embeds"):
            body = {"instances": [{name: value}], "parameters": {"sampling_params": PARAMS}}
            yield Sent("/vertex_generate", body, refused=False)
    for one in msgspec.structs.fields(SessionParams):
        for value in (next(values), True, "x", {}, []):
            yield from session(one.name, value, opened)


def links(number: int) -> Iterator[Sent]:
    """Parameters of policies that would be built at length."""
    for link in (
        "kvlink:tokens=9999999999999999999",
        f"kvlink:tokens={10**7 + number}",
        "base+kvlink:tokens=10000000",
        f"epic:tokens={10**60}",
        "query:ratio=nan",
        "block:" + "x" * (1 << 20),
        "block\ud800",
    ):
        for path, body in CHUNKED.items():
            yield Sent(path, {**body, "link": link})
        yield Sent("/chunks", {"chunks": [DOCUMENT], "link": link}, headers=(*ADMIN.items(),))


def server_fields() -> Iterator[Sent]:
    """Those that only the server may set, and a layout that claims another tenant's salt."""
    for name in SERVER_FIELDS:
        for path, body in PLAIN.items():
            yield Sent(path, {**body, name: "x"})
    for name in SERVER_FIELDS:
        yield Sent("/generate", {**CHUNKED["/generate"], name: "x"})
        yield Sent("/vertex_generate", {**PLAIN["/vertex_generate"], "parameters": {name: "x"}})
    layout = {"v": 1, "chunks": [[0, 1]], "cache_salt": "another's", "link": "block"}
    forged = {"sglang_lazy": json.dumps(layout)}
    for prompt in ({"text": "Who?"}, {"input_ids": [5, 6, 7]}, {"segments": SEGMENTS[::2]}):
        yield Sent("/generate", {**prompt, "sampling_params": {"custom_params": forged}})
    for path in ("/v1/completions", "/v1/chat/completions", "/invocations"):
        yield Sent(path, {**PLAIN[path], "custom_params": forged})
    parameters = {"sampling_params": {"custom_params": forged}}
    yield Sent("/vertex_generate", {**PLAIN["/vertex_generate"], "parameters": parameters})
    for name in INTERNAL_PARAMS:
        yield Sent("/generate", {"text": "Who?", "sampling_params": {name: True}})


def salts(number: int) -> Iterator[Sent]:
    """Salts that cannot be shown or are long, and headers that are given twice."""
    for salt in ("\ud800", "a\0b", "a\nb", "", f"{number}" + "x" * (1 << 20)):
        for path, body in CHUNKED.items():
            yield Sent(path, {**body, "cache_salt": salt})
        for path in SALTED[2:5]:
            yield Sent(path, {**PLAIN[path], "cache_salt": salt})
            yield Sent(path, {**PLAIN[path], "extra_key": salt or "\ud800"})
        yield Sent("/generate", {"text": "Who?", "extra_key": salt or "\ud800"})
        yield Sent("/chunks", {"chunks": [DOCUMENT], "cache_salt": salt}, headers=(*ADMIN.items(),))
    twice = (("X-Cache-Salt", "a"), ("X-Cache-Salt", "b"))
    for path in (*SALTED, "/api/generate", "/api/chat", "/vertex_generate"):
        yield Sent(path, PLAIN[path], headers=twice)
    for path, body in CHUNKED.items():
        yield Sent(path, body, headers=twice)
    yield Sent("/chunks", {"chunks": [DOCUMENT]}, headers=(*ADMIN.items(), *twice))
    for path in ("/chunks", "/chunks?cache_salt=a%00", "/lazy/survey"):
        yield Sent(path, None, method="GET", headers=(*ADMIN.items(), *(twice if "?" not in path else ())))


def keys() -> Iterator[Sent]:
    """A key that is not ASCII."""
    for method, path in (
        ("GET", "/chunks"),
        ("POST", "/chunks"),
        ("DELETE", "/chunks?id=" + "0" * 16),
        ("GET", "/chunks/" + "0" * 16),
        ("PATCH", "/chunks/" + "0" * 16),
        ("DELETE", "/chunks/" + "0" * 16),
        ("GET", "/lazy"),
        ("GET", "/lazy/survey"),
        ("GET", "/lazy/uses/" + "0" * 16),
        ("POST", "/flush_cache"),
    ):
        yield Sent(path, {}, method=method, headers=(("Authorization", "Bearer \xe4"),))


def large() -> Iterator[Sent]:
    """More chunks than any prompt may have: as parts, and by a separator at every second character."""
    parts, divided = [{"type": "chunk", "text": "a"}] * NUM_PARTS, "a#" * 2_000_000
    messages = [{"role": "user", "content": parts}]
    for path, body in CHUNKED.items():
        fields = {"segments": parts} if "segments" in body else {"input": messages, "messages": messages}
        yield Sent(path, {name: fields.get(name, value) for name, value in body.items()})
    messages = [{"role": "user", "content": divided}]
    for path in SALTED:
        fields = {"text": divided, "prompt": divided, "input": divided, "messages": messages}
        body = {name: fields.get(name, value) for name, value in PLAIN[path].items()}
        yield Sent(path, {**body, "chunk_separator": "#"})


KINDS = {
    "wrong types": wrong_types,
    "links": lambda number, _: links(number),
    "the server's fields": lambda *_: server_fields(),
    "salts": lambda number, _: salts(number),
    "keys": lambda *_: keys(),
    "large": lambda *_: large(),
}


# The server, and those who watch it


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    adapter = random_adapter(tiny_model, tmp_path_factory.mktemp("adapter") / "a", seed=1, rank=4)
    log = tmp_path_factory.mktemp("lethal") / "server.log"
    flags = ["--model-path", tiny_model, "--served-model-name", "m", "--context-length", "512"]
    flags += ["--max-total-tokens", "2000", "--lora-paths", f"a={adapter}", "--max-loras-per-batch", "2"]
    flags += ["--admin-api-key", "admin", "--log-level", "error", *device_flags()]
    with running_server(flags, log) as url:
        yield url, log


def processes_of(url: str) -> list[psutil.Process]:
    """The server's process, which listens there, and those that it has started."""
    port = int(url.rpartition(":")[2])
    (pid,) = {one.pid for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port}
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def memory(processes: list[psutil.Process]) -> int:
    """Bytes that no other process shares."""
    return sum(process.memory_full_info().uss for process in processes)


def ask(url: str) -> float:
    """Send a short prompt; returns the seconds until its answer."""
    start = time.monotonic()
    body = {"text": "ok", "sampling_params": {"max_new_tokens": 1}}
    answer = requests.post(f"{url}/generate", json=body, timeout=PATIENCE)
    assert answer.ok, answer.text
    return time.monotonic() - start


@contextlib.contextmanager
def another_client(url: str) -> Iterator[list[float]]:
    """It sends short prompts all the while. Yields the seconds that each took."""
    times: list[float] = []
    end, failures = threading.Event(), []

    def run() -> None:
        try:
            while not end.is_set():
                times.append(ask(url))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield times
    finally:
        end.set()
        thread.join()
    if failures:
        raise failures[0]


def send(connection: http.client.HTTPConnection, one: Sent) -> tuple[int, str]:
    """(requests cannot send a header twice.)"""
    connection.putrequest(one.method, one.path)
    data = b"" if one.body is None else json.dumps(one.body).encode()
    for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(data))), *one.headers):
        connection.putheader(name, value.encode("latin-1"))
    connection.endheaders(data)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def attack(url: str, kind: str, number: int) -> int:
    """Send all requests of a kind. Returns how many there were."""
    opened = requests.post(f"{url}/open_session", json={"capacity_of_str_len": 1000}, timeout=PATIENCE).json()
    turn = {"text": "Who?", "sampling_params": PARAMS, "session_params": {"id": opened}}
    assert requests.post(f"{url}/generate", json=turn, timeout=PATIENCE).ok
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=PATIENCE)
    count = 0
    for one in KINDS[kind](number, opened):
        try:
            status, text = send(connection, one)
        except OSError as error:
            raise AssertionError(f"{str(one)[:300]}: {error!r}") from None
        allowed = {401} if ("Authorization", "Bearer \xe4") in one.headers else {400}
        assert status in (allowed if one.refused else {200, 400}), (str(one)[:300], status, text[:500])
        assert '"code":5' not in text, (str(one)[:300], text[:500])
        count += 1
    connection.close()
    assert requests.post(f"{url}/close_session", json={"session_id": opened}, timeout=PATIENCE).ok
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_ends_a_process_or_delays_others_or_keeps_memory(server, kind):
    url, log = server
    processes = processes_of(url)
    assert len(processes) >= 3, "the HTTP server, the scheduler, the detokenizer"
    idle = max(ask(url) for _ in range(10))
    kept = []
    for number in range(ROUNDS):
        with another_client(url) as times:
            count = attack(url, kind, number)
        print(f"{count} requests beside {len(times)} others: at most {max(times):.3f} s (idle {idle:.3f} s)")
        assert max(times) < 1 + 10 * idle, "another client waits"
        assert requests.post(f"{url}/flush_cache?timeout=30", headers=ADMIN, timeout=PATIENCE).ok, log_tail(log)
        kept.append(memory(processes))
    assert all(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)
    assert processes_of(url) == processes
    print("MiB:", *(size >> 20 for size in kept))
    assert max(kept[1:]) - kept[0] < KEPT
    for path in ("/chunks?all=true", "/lazy/survey?all=true"):
        answer = requests.get(url + path, headers=ADMIN, timeout=PATIENCE)
        assert answer.ok, answer.text
    assert requests.get(f"{url}/chunks?all=true", headers=ADMIN, timeout=PATIENCE).json()["total"] == 0

"""Distinct requests, for as long as one likes: no process keeps what they bring.

LAZY_MEMORY_SECONDS is how long they are sent. What processes may remember, and how much of it, is tested in
test/unit/test_remembered.py; this finds what nobody thought of.
"""

import itertools
import os
import random
import time

import psutil
import requests

from sglang_lazy.testing import Client

SECONDS = float(os.environ.get("LAZY_MEMORY_SECONDS") or 6)
LIMITED = 100
"""MiB that a process may take for what it remembers of them."""
LETTERS = "".join(map(chr, range(0x4E00, 0x8000)))


def requests_of(dice):
    """Requests that repeat nothing but their form, some of which are refused."""
    numbers = itertools.count()

    def name(length=200):
        return "".join(dice.choices(LETTERS, k=length - 9)) + f"{next(numbers):09}"

    def chunks(number, length):
        return [{"type": "chunk", "text": name(length)} for _ in range(number)]

    one = {"max_new_tokens": 1, "temperature": 0}
    while True:
        for number, length in ((200, 60), (4, 12), (1, 10), (257, 10)):
            yield "/generate", {"segments": [*chunks(number, length), name(12)], "sampling_params": one}
        salted = {"segments": [*chunks(2, 12), name(12)], "sampling_params": one}
        yield "/generate", {**salted, "cache_salt": name(), "extra_key": name(), "rid": name()}
        yield "/generate", {**salted, "link": f"query:ratio=0.{next(numbers)}", "cache_salt": name()}
        yield "/generate", {**salted, "link": name(), "cache_salt": name()}
        yield "/generate", {"segments": [{"type": "chunk", "id": f"{dice.getrandbits(64):016x}"}], "cache_salt": name()}
        yield "/generate", {"text": name(30), "sampling_params": one, "extra_key": name()}
        yield "/v1/completions", {"model": "default", "prompt": name(30), "max_tokens": 1, "cache_salt": name()}
        message = {"role": "user", "content": [*chunks(2, 12), {"type": "text", "text": name(20)}]}
        yield "/v1/chat/completions", {"model": "default", "messages": [message], "max_tokens": 1, "cache_salt": name()}
        yield "/v1/messages", {"model": "default", "messages": [message], "max_tokens": 1, "cache_salt": name()}
        response = {"model": "default", "input": [message], "max_output_tokens": 16, "cache_salt": name()}
        yield "/v1/responses", {**response, "store": False}
        ids = {"input_ids": [dice.randrange(10, 500) for _ in range(3)]}
        yield "/chunks", {"chunks": [ids, name(10)], "cache_salt": name(), "pin": True, "ttl": 1}


def server_processes(url):
    port = int(url.rpartition(":")[2])
    (pid,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == "LISTEN" and connection.laddr.port == port
    }
    http = psutil.Process(pid)
    return [http, *http.children(recursive=True)]


def held(url, processes):
    """MiB of each process once the cache has been emptied."""
    Client(url).flush_cache()
    return {f"{one.pid} {one.name()}": one.memory_info().rss / 2**20 for one in processes}


def test_distinct_requests_do_not_fill_memory(server):
    processes, sent = server_processes(server), requests_of(random.Random(0))
    session = requests.Session()
    measured = []
    for seconds in (1, SECONDS / 2, SECONDS / 2):
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            route, body = next(sent)
            assert session.post(f"{server}{route}", json=body, timeout=120).status_code < 500
            number += 1
        measured.append(held(server, processes))
        print(number, {name: round(value, 1) for name, value in measured[-1].items()})
    for name, before in measured[0].items():
        assert measured[-1][name] - before < LIMITED, (name, measured)


def test_long_salts_are_refused_and_leave_nothing(server):
    processes = server_processes(server)
    before = held(server, processes)
    for number in range(40):
        prompt = [{"type": "chunk", "text": f"Fact {number}."}, "Why?"]
        body = {"segments": prompt, "cache_salt": f"{number:07}" * 150_000}
        assert requests.post(f"{server}/generate", json=body, timeout=120).status_code == 400
    after = held(server, processes)
    for name, mebibytes in before.items():
        assert after[name] - mebibytes < 20, (name, before, after)

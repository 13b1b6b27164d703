"""A server with two tokenizer workers: what one of them is told, the other knows."""

import concurrent.futures
import contextlib
import os
import time

import psutil
import pytest
import requests
from stored import NUM_TOKENS, Server

from oracle.block_mask import Oracle
from oracle.scenarios import Dice
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = pytest.mark.slow  # starts a server

# Seconds after which a worker that does not answer is replaced, even while it starts. On two busy cores, imports may
# take longer than the default of 10.
HEALTH_CHECK = 30
ENVIRONMENT = {
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",  # a connection stays with its worker
    "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": str(HEALTH_CHECK),
}


class Workers:
    """The tokenizer workers of the server at `url`."""

    def __init__(self, url):
        self.url, self.port = url, int(url.rpartition(":")[2])

    def all(self):
        """The worker processes in the order of their start."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith("sglang::tokenizer_worker") and self._ports(process):
                    found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    def _ports(self, process):
        """Ports from which clients are connected to it, and None for the server's own connections."""
        connections = process.net_connections("tcp")
        return {one.raddr and one.raddr.port for one in connections if one.laddr.port == self.port}

    def client(self, process):
        """A session over one connection that this worker has accepted, since the others were stopped."""
        others = [other for other in self.all() if other != process]
        before, session = self._ports(process), requests.Session()
        for other in others:
            other.suspend()
        try:
            assert session.get(f"{self.url}/lazy_info", timeout=60).ok
        finally:
            for other in others:
                other.resume()
        assert len(self._ports(process) - before) == 1
        return session


class Client(Server):
    """Talks to one worker. Its connection carries one request at a time."""

    def __init__(self, url, oracle, session):
        super().__init__(url, None, oracle)
        self.session = session

    def call(self, method, path, **options):
        return self.session.request(method, self.url + path, timeout=60, **options)

    def ask(self, prompt, **options):
        segments = [one if isinstance(one, dict) else one.to_request() for one in prompt]
        params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
        body = {"segments": segments, "sampling_params": params, "return_logprob": True, **options}
        return self.call("POST", "/generate", json=body)


@pytest.fixture(scope="module")
def workers(tiny_model, tmp_path_factory):
    flags = ["--model-path", tiny_model, "--max-total-tokens", "1000", "--enable-metrics", *device_flags()]
    flags += ["--tokenizer-worker-num", "2"]
    with running_server(flags, tmp_path_factory.mktemp("workers") / "server.log", environment=ENVIRONMENT) as url:
        workers = Workers(url)
        assert wait_for(lambda: len(workers.all()) == 2, timeout=120)
        yield workers


@pytest.fixture(scope="module")
def clients(workers, tiny_model):
    """One client per worker."""
    oracle = Oracle(tiny_model)
    return [Client(workers.url, oracle, workers.client(process)) for process in workers.all()]


def named(client, chunk):
    """Register a chunk with this worker; returns its id."""
    answer = client.call("POST", "/chunks", json={"chunks": [{"input_ids": list(chunk.ids)}], "wait": True})
    assert answer.json()["skipped"] == []
    (name,) = answer.json()["affected"]
    return name


def test_both_answer_over_the_same_chunks(clients):
    """Side by side, as the oracle does; chunks that one worker had computed are hits for the other."""
    dice = Dice("both")
    docs = dice.chunks(3, 20, 60)
    assert clients[0].hits([dice.text(5), *docs, dice.text(4)]) == [False] * 3
    assert clients[1].hits([docs[2], dice.text(5), docs[0], dice.text(4)]) == [True] * 2
    with concurrent.futures.ThreadPoolExecutor() as pool:
        prompts = [[[dice.text(3), *dice.shuffled(docs), dice.text(3)] for _ in range(8)] for _ in clients]
        found = pool.map(lambda client, mine: [client.hits(prompt) for prompt in mine], clients, prompts)
        assert list(found) == [[[True] * 3] * 8] * 2


def test_an_id_is_known_to_both_until_one_deletes_it(clients):
    dice = Dice("ids")
    chunk, question = dice.chunks(1, 20, 40)[0], dice.text(5)
    name = named(clients[0], chunk)
    expected = clients[1].ask([chunk, question]).json()
    prompt = [{"type": "chunk", "id": name}, question]
    for client in clients:
        answer = client.ask(prompt).json()
        assert answer["output_ids"] == expected["output_ids"] and answer["meta_info"]["chunks"][0]["hit"]
        (listed,) = client.call("GET", f"/chunks/{name}").json()["chunks"]
        assert listed["state"] == "resident"
    assert clients[1].call("DELETE", f"/chunks/{name}").json()["skipped"] == []
    for client in clients:
        refused = client.ask(prompt)
        assert refused.status_code == 404 and name in refused.text
        assert client.call("GET", f"/chunks/{name}").status_code == 404


def test_both_report_why_a_registration_failed(clients):
    too_long = {"chunks": [{"input_ids": list(Dice("too long").ids(1200))}]}
    (name,) = clients[0].call("POST", "/chunks", json=too_long).json()["accepted"]

    def progress(client):
        return client.call("GET", f"/chunks/{name}").json()["registration"]

    assert wait_for(lambda: progress(clients[1])["state"] == "failed")
    assert progress(clients[0]) == progress(clients[1]) and "1201 tokens" in progress(clients[0])["reason"]


def test_pins_and_metrics_are_the_servers(clients):
    dice = Dice("pins")
    chunk, question = dice.chunks(1, 20, 40)[0], dice.text(5)
    name = named(clients[0], chunk)

    def is_pinned():
        return clients[0].call("GET", f"/chunks/{name}").json()["chunks"][0]["pinned"]

    for how in ({"pin": True}, {"ttl": 0.1}):  # only then with an end, which may come before the next call
        pinned = clients[1].call("PATCH", f"/chunks/{name}", json=how).json()["affected"]
        assert [one["id"] for one in pinned] == [name]
        assert "ttl" in how or is_pinned()
    assert wait_for(lambda: not is_pinned())
    reused = ("sglang:cached_tokens_total", {"cache_source": "chunk"})
    before = [client.metric(reused[0], **reused[1]) for client in clients]
    assert before[0] == before[1]
    for client in clients:
        assert client.hits([chunk, question]) == [True]
    assert clients[0].metric(reused[0], **reused[1]) == before[0] + 2 * len(chunk.ids)


def test_aborted_requests_are_answered(workers):
    """Waiting, running and half-way there, whichever worker is told."""
    count, dice = int(os.environ.get("LAZY_ABORTED", 40)), Dice("aborted")
    params = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}

    def ask(i):
        segments = [segment.to_request() for segment in (dice.text(3), *dice.chunks(1, 40, 60), dice.text(3))]
        body = {"segments": segments, "sampling_params": params, "rid": f"aborted-{i}."}
        return requests.post(f"{workers.url}/generate", json=body, timeout=120).json()["meta_info"]["finish_reason"]

    def abort(i):
        while not answers[i].done():  # before the request has arrived, there is nothing to abort
            requests.post(f"{workers.url}/abort_request", json={"rid": f"aborted-{i}."}, timeout=60).raise_for_status()
            time.sleep(0.5)

    with concurrent.futures.ThreadPoolExecutor(count) as asking, concurrent.futures.ThreadPoolExecutor(4) as aborting:
        answers = [asking.submit(ask, i) for i in range(count)]
        list(aborting.map(abort, reversed(range(count))))
    ends = [answer.result()["type"] for answer in answers]
    assert set(ends) <= {"abort", "length"} and ends[-1] == "abort"  # the last one had to wait


def test_adapters_stay_as_they_are(clients):
    answer = clients[0].call("POST", "/unload_lora_adapter", json={"lora_name": "x"})
    assert answer.status_code == 400 and "--lora-paths" in answer.text


def test_errors_are_answered_as_by_one_process(clients):
    for client in clients:
        malformed = client.call("POST", "/v1/chat/completions", json={"messages": 5})
        assert malformed.status_code == 400 and "messages" in malformed.json()["message"]
        assert "sglang" not in malformed.text and "input_value" not in malformed.text
        mistake = client.call("POST", "/resume_memory_occupation", json={"tags": ["weights"]})
        assert mistake.status_code == 400 and "was not released" in mistake.json()["error"]["message"]


def test_a_worker_that_dies_takes_nothing_with_it(workers, clients):
    """A new worker takes its place, and knows what was registered."""
    dice = Dice("dies")
    chunk, question = dice.chunks(1, 20, 40)[0], dice.text(5)
    first, second = workers.all()
    name = named(clients[1], chunk)
    second.kill()
    assert clients[0].hits([chunk, question]) == [True]
    # A killed process counts as alive until its memory is released: a health check meanwhile waits for its answer.
    assert wait_for(lambda: len(workers.all()) == 2 and second not in workers.all(), timeout=HEALTH_CHECK + 60)
    another = next(process for process in workers.all() if process != first)
    answer = Client(workers.url, clients[0].oracle, workers.client(another)).ask(
        [{"type": "chunk", "id": name}, question]
    )
    assert answer.json()["output_ids"] == clients[0].ask([chunk, question]).json()["output_ids"]

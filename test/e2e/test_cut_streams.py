"""Prompts whose clients leave while their chunks are computed, and places for those who stay.

The server counts what requests hold (`fakes/leftovers.py`). Besides, SGLang ends it if slots or rows are lost, and ours
if locks or pending chunks are left when it is idle.

LAZY_CUTS: how many streams to cut in all, 1,000 before a release.
"""

import contextlib
import http.client
import itertools
import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from http_prompts import ids

from fakes import leftovers, no_gpu_to_wait_for
from oracle.adapters import random_adapter
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]

NUM_CUTS = int(os.environ.get("LAZY_CUTS", "32"))
TIERS = ["--enable-hierarchical-cache", "--hicache-ratio", "2"]
PRIORITIES = ["--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "3"]
IN_TURN = ["--disable-overlap-schedule"]
SERVERS = {
    "overlap": (2, []),
    "in turn, host tier": (4, [*IN_TURN, *TIERS, *PRIORITIES]),
    "overlap, host tier": (8, [*TIERS, *PRIORITIES]),
    "in turn": (2, IN_TURN),
}
"""By name, the places of each server and its flags."""
TESTED = [*SERVERS] if NUM_CUTS >= 1000 else ["in turn, host tier", pytest.param("overlap", marks=pytest.mark.nightly)]
PATIENCE = 120  # seconds
PIECE = 8  # tokens, so that a long chunk takes a hundred passes
LINKS = ("block", "block", "base", "epic:tokens=4", "copy", "query:ratio=0.2", "blend:ratio=0.2", "static:ratio=0.2")
LORA_PATHS = (None, None, "a", "b")
WAYS = {"abort": 9, "leave": 6, "abort_all": 0.3, "read": 2}
"""How streams end, and how often."""
TOGETHER = 10
"""Streams at a time: more than there are places."""


class Server:
    def __init__(self, url, places, log):
        self.url, self.places, self.log = url, places, log
        self.numbers = random.Random(url)

    def post(self, path, **body):
        return requests.post(self.url + path, json=body, timeout=PATIENCE)

    def held(self):
        """What requests hold, by name, and the number of passes."""
        (state,) = requests.get(f"{self.url}/server_info", timeout=PATIENCE).json()["internal_states"]
        left = state[leftovers.NAME]
        passes = left.pop(leftovers.PASSES)
        return {name: number for name, number in left.items() if number}, passes

    def settled(self):
        """Wait until nobody has a request here, and until nothing is held. Returns the number of passes in between."""
        assert wait_for(lambda: "requests" not in self.held()[0], PATIENCE), self.held()
        passes = self.held()[1]
        assert wait_for(lambda: not self.held()[0], PATIENCE), self.held()
        return self.held()[1] - passes

    @contextlib.contextmanager
    def slowly(self, seconds=0.2):
        """Long passes, so that a client finds a prompt half computed."""
        assert self.post("/slow_down", forward_sleep_time=seconds).ok
        try:
            yield
        finally:
            self.post("/slow_down", forward_sleep_time=0)

    def tokens(self, count):
        """Tokens that nobody has sent before."""
        return [self.numbers.randrange(10, 500) for _ in range(count)]


@pytest.fixture(scope="module", params=TESTED)
def server(request, tiny_model, tmp_path_factory, with_plugin):
    places, flags = SERVERS[request.param]
    folder = tmp_path_factory.mktemp("cuts")
    adapters = [f"{name}={random_adapter(tiny_model, folder / name, seed=ord(name), rank=4)}" for name in "ab"]
    flags = ["--model-path", tiny_model, "--max-total-tokens", "3000", "--chunked-prefill-size", str(PIECE), *flags]
    flags += ["--max-running-requests", str(places), "--lazy-preamble", "These lines stand alone."]
    flags += ["--max-queued-requests", "12", "--max-loras-per-batch", "2", "--lora-paths", *adapters, *device_flags()]
    log = folder / "server.log"
    with with_plugin(leftovers.load), with_plugin(no_gpu_to_wait_for.load), running_server(flags, log) as url:
        yield Server(url, places, log)


class Stream:
    """A request of its own connection, which can be cut at any time.

    rid: its id.  body: its other fields.
    """

    def __init__(self, server, rid, **body):
        self.rid, self.server = rid, server
        host, port = server.url.removeprefix("http://").split(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
        body = json.dumps({"rid": rid, **body})
        self.connection.request("POST", "/generate", body, {"Content-Type": "application/json"})

    def leave(self):
        self.connection.close()

    def abort(self):
        assert self.server.post("/abort_request", rid=self.rid).ok

    def abort_all(self):
        assert self.server.post("/abort_request", abort_all=True).ok

    def read(self):
        """The whole answer, whatever it is."""
        with contextlib.closing(self.connection):
            return self.connection.getresponse().read()


def params(num_tokens, **more):
    return {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True, **more}


# The end of what nobody waits for


@pytest.mark.parametrize(
    "link, way",
    [*itertools.product(["block", "query:ratio=0.2"], ["abort", "leave"]), ("blend:ratio=0.2", "abort_all")],
)
def test_a_prompt_that_leaves_takes_its_fill_or_probe_along(server, link, way):
    """In the middle of it; the server is idle after the pass under way."""
    document, question = ids("chunk", *server.tokens(700)), ids("text", *server.tokens(1000))
    if link != "block":  # the fill ends first: the document is known, and the probe computes the question
        assert server.post("/generate", segments=[document, question], sampling_params=params(1)).ok
    with server.slowly():
        stream = Stream(server, "leaves", segments=[document, question], link=link, stream=True)
        assert wait_for(lambda: "internal and half computed" in server.held()[0], PATIENCE)
        getattr(stream, way)()
        if way == "leave":
            assert server.settled() <= 1
            return
        assert wait_for(lambda: "requests" not in server.held()[0], PATIENCE)
        passes = server.held()[1]
    assert server.post("/flush_cache").ok, "the fill still runs"
    assert server.post("/generate", segments=[ids("text", 5, 6, 7)], sampling_params=params(1)).ok
    assert server.held()[1] <= passes + 2
    stream.read()


@pytest.mark.parametrize("call", ["/update_weights_from_disk", "/release_memory_occupation"])
def test_weights_and_memory_after_an_abort(server, call, tiny_model):
    """Both need a server without requests, and end one that has any."""
    with server.slowly():
        stream = Stream(server, "leaves", segments=[ids("chunk", *server.tokens(700)), ids("text", 5)], stream=True)
        assert wait_for(lambda: "internal and half computed" in server.held()[0], PATIENCE)
        stream.abort()
        stream.read()
    assert server.post(call, **({"model_path": tiny_model} if "weights" in call else {})).ok
    if "memory" in call:
        assert server.post("/resume_memory_occupation").ok
    assert server.post("/generate", segments=[ids("text", 5, 6, 7)], sampling_params=params(1)).ok
    assert server.settled() <= 1


def test_a_flush_after_aborts_while_paused(server):
    """Prompts that wait hold locks on chunks, and nothing is scheduled that would release them."""
    cached = ids("chunk", *server.tokens(50))
    prompts = [[cached, ids("chunk", *server.tokens(400)), ids("text", 5 + i)] for i in range(2)]
    assert server.post("/generate", segments=[cached, ids("text", 5)], sampling_params=params(1)).ok
    with server.slowly():
        streams = [Stream(server, f"paused {i}", segments=prompt, stream=True) for i, prompt in enumerate(prompts)]
        assert wait_for(lambda: server.held()[0].get("holders of locks") == 2, PATIENCE)
        assert server.post("/pause_generation", mode="retract").ok
    streams[0].abort_all()
    assert server.post("/flush_cache").ok
    assert server.post("/continue_generation").ok
    for stream in streams:
        stream.read()
    assert server.settled() <= 1
    assert server.post("/generate", segments=prompts[0], sampling_params=params(1)).ok


# Places


@pytest.mark.parametrize("link", ["block", "query:ratio=0.2"])
def test_the_last_place_goes_to_a_prompt_whose_chunk_is_missing(server, link):
    """And to one with cached chunks, whose policy probes: neither waits for another's whole answer."""
    assert server.settled() <= 1
    num_others = server.places - 1
    num_tokens = min(1200, 2400 // num_others)
    busy = {"sampling_params": params(num_tokens), "stream": True}
    with server.slowly(PATIENCE / num_tokens):  # their answers outlast our patience: none ends before
        others = [Stream(server, f"other {i}", input_ids=[5, 6, 7 + i], **busy) for i in range(num_others)]
        assert wait_for(lambda: server.held()[0].get("running") == num_others, PATIENCE), server.held()
        document = ids("chunk", *server.tokens(40))
        for _ in range(3):
            more = [ids("chunk", *server.tokens(20))] if link == "block" else []
            segments = [document, *more, ids("text", *server.tokens(5))]
            assert server.post("/generate", segments=segments, link=link, sampling_params=params(2)).ok
            assert server.held()[0].get("requests") == num_others, "it has waited until another one was answered"
    for stream in others:
        stream.abort()
        stream.read()
    assert server.settled() <= 1


# Streams that are cut at random times


class Traffic:
    """Random prompts over documents that are cached, missing, under way, or in host memory."""

    def __init__(self, server, seed):
        self.server, self.dice = server, random.Random(seed)
        self.documents = [self.tokens(self.dice.choice([5, 40, 150])) for _ in range(12)]
        self.num_cut_short = 0

    def tokens(self, count):
        return [self.dice.randrange(10, 500) for _ in range(count)]

    def body(self):
        dice = self.dice
        chunks = [dice.choice(self.documents) for _ in range(dice.randint(0, 3))]
        if dice.random() < 0.5:
            chunks.append(self.tokens(dice.choice([10, 80, 300])))
        segments = [ids("text", *self.tokens(dice.choice([1, 10, 60])))]
        for tokens in chunks:
            segments += [ids("chunk", *tokens), ids("text", *self.tokens(dice.choice([1, 5, 40])))]
        return {
            "segments": segments,
            "link": dice.choice(LINKS),
            "sampling_params": params(dice.choice([1, 4, 60]), n=dice.choice([1, 1, 1, 2, 3])),
            "priority": dice.choice([0, 0, 1, 9]),
            "stream": dice.random() < 0.7,
            "lora_path": dice.choice(LORA_PATHS),
        }

    def cut(self, rid, body, start, wait, way):
        """Send one request and, mostly, cut it."""
        time.sleep(start)
        stream = Stream(self.server, rid, **body)
        time.sleep(wait)
        if way != "read":
            getattr(stream, way)()
        if way != "leave":
            self.num_cut_short += b'"type":"abort"' in stream.read()

    def pause(self, start, mode):
        """Pause the server for a moment."""
        time.sleep(start)
        assert self.server.post("/pause_generation", mode=mode).ok
        time.sleep(0.2)
        assert self.server.post("/continue_generation").ok

    def round(self, first, count):
        """Cut `count` streams. All that is random is drawn before. Returns the number of the next stream."""
        dice, streams = self.dice, []
        while count:
            way = dice.choices([*WAYS], WAYS.values())[0]
            rid = f"stream-{first + len(streams)}-"  # none begins with another
            streams.append((rid, self.body(), dice.uniform(0, 0.3), dice.expovariate(3), way))
            count -= way != "read"
        pauses = [(dice.uniform(0, 0.5), dice.choice(["retract", "in_place"]))] if dice.random() < 0.3 else []
        with ThreadPoolExecutor(len(streams) + 1) as clients:
            running = [clients.submit(self.cut, *stream) for stream in streams]
            running += [clients.submit(self.pause, *pause) for pause in pauses]
        for each in running:
            each.result()
        return first + len(streams)


def test_streams_that_are_cut_leave_nothing_behind(server):
    """No place, row, lock, slot, pending chunk, adapter or fill; and the same answers as before."""
    known = {"segments": [ids("text", 9), ids("chunk", *range(50, 90)), ids("text", 8)], "sampling_params": params(8)}
    expected = server.post("/generate", **known).json()["output_ids"]
    traffic, number, left = Traffic(server, "cuts"), 0, NUM_CUTS // len(TESTED)
    while left:
        count = min(TOGETHER, left)
        number, left = traffic.round(number, count), left - count
        assert server.settled() <= 1, "something was computed that nobody waited for"
        assert server.post("/generate", **known).json()["output_ids"] == expected
    assert traffic.num_cut_short, "all were answered before they were cut"
    assert server.settled() <= 1 and server.post("/flush_cache").ok
    assert server.post("/generate", **known).json()["output_ids"] == expected
    for adapter in "ab":
        assert server.post("/unload_lora_adapter", lora_name=adapter).ok

"""What the picker learns from KV events: hand-made ones, a cache's, and those of a worker that comes and goes."""

import asyncio
import itertools
import logging

import msgspec
import pytest
import zmq
from aiohttp import web
from aiohttp.test_utils import TestServer
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from transformers import AutoTokenizer

from fakes.loop import QUESTION, A, B, Loop
from fakes.requests import CHUNK
from sglang_lazy.core.keys import Namespace
from sglang_lazy.routing import BlockHashes, Picker, follow
from sglang_lazy.routing import events as routing_events
from sglang_lazy.routing.events import Listener
from sglang_lazy.testing.server import free_ports

WORKER, OTHER = "http://worker", "http://other"
PUBLIC = Namespace("chunk", None, None)
GPU, CPU = StorageMedium.GPU, StorageMedium.CPU


def hashes(tokens):
    """What SGLang calls the KV of each of these tokens at the start of a prompt."""
    return [hash_str_to_int64(name) for name in get_hash_str(list(tokens), None, page_size=1)]


def stored(tokens, after=0, medium=GPU):
    """The events of these tokens, without the first `after`, which are known."""
    parents = [None, *hashes(tokens)]
    blocks = zip(parents, parents[1:], tokens, strict=False)
    return [BlockStored([own], parent, [token], 1, None, medium) for parent, own, token in blocks][after:]


def removed(tokens, after=0, medium=GPU):
    return [BlockRemoved(hashes(tokens)[after:], medium)]


def encode(events, rank=0):
    return msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events, attn_dp_rank=rank))


def message(number, events, rank=0):
    return [b"", number.to_bytes(8, "big"), encode(events, rank)]


def knows(picker, tokens, worker=WORKER):
    """Whether the picker takes the worker to have the chunk of these tokens."""
    return picker._caches[worker].has(hashes(tokens)[-1])


class Told:
    """A picker and who tells it."""

    def __init__(self, **options):
        self.picker = Picker(**options)
        self.listener = Listener(WORKER, self.picker)
        self.numbers = [itertools.count(), itertools.count()]

    def tell(self, *events, rank=0):
        self.listener.take(message(next(self.numbers[rank]), list(events), rank))

    def knows(self, *chunks):
        return [knows(self.picker, tokens) for tokens in chunks]


FIRST, SECOND = (1, 2, 3, 4), (1, 2, 7)


def test_chunks_are_there_from_one_event_to_the_other():
    told = Told()
    told.tell(*stored(FIRST), *stored(SECOND, after=2))
    assert told.knows(FIRST, SECOND, (1, 2, 8)) == [True, True, False]
    told.tell(*removed(FIRST, after=2))
    assert told.knows(FIRST, SECOND) == [False, True]
    told.tell(*stored((5, 6)), AllBlocksCleared(), *stored((8, 9)))
    assert told.knows(SECOND, (5, 6), (8, 9)) == [False, False, True]


def test_a_prompt_goes_where_another_s_chunks_are():
    told = Told()
    told.tell(*stored(FIRST))
    for _ in range(3):
        assert told.picker.pick({hashes(FIRST)[-1]: 1}, {OTHER: 0, WORKER: 1}).worker == WORKER


def test_a_chunk_that_was_sent_is_gone_when_it_is_said_to_be():
    told = Told()
    name = hashes(FIRST)[-1]
    told.picker.pick({name: 1, "a tenant's": 1}, {WORKER: 0}).answered({name: False})
    told.tell(*stored(FIRST), *removed(FIRST))
    assert told.knows(FIRST) == [False] and told.picker._caches[WORKER].has("a tenant's")


def test_answers_do_not_take_away_what_events_have_told():
    """A worker evicts by other rules than the picker thinks: here the last used first."""
    told = Told()
    told.tell(*stored(FIRST))
    first, second = hashes(FIRST)[-1], hashes(SECOND)[-1]
    told.picker.pick({first: 1}, {WORKER: 0}).answered({first: True})
    for _ in range(2):
        told.picker.pick({second: 1}, {WORKER: 0}).answered({second: False})
    assert told.knows(FIRST, SECOND) == [True, True]


def test_a_chunk_is_there_while_one_tier_or_rank_has_it():
    told = Told()
    told.tell(*stored(FIRST), *stored(FIRST, medium=CPU))
    told.tell(*stored(FIRST), rank=1)
    for event, rank in ((removed(FIRST), 0), (removed(FIRST), 1)):
        told.tell(*event, rank=rank)
        assert told.knows(FIRST) == [True]
    told.tell(*removed(FIRST, medium=CPU))
    assert told.knows(FIRST) == [False]


def test_memory_is_bounded():
    told = Told(capacity=3)
    for batch in range(50):
        told.tell(*itertools.chain(*(stored((batch, other)) for other in range(20))))
    told.tell(*(BlockRemoved([number], GPU) for number in range(1000)))
    (kept,) = told.picker._caches[WORKER].stored.values()
    assert list(kept) == [hashes((49, other))[-1] for other in (17, 18, 19)]


def test_of_a_long_chunk_one_name_is_kept():
    told = Told()
    told.tell(*stored(range(500)))
    assert len(told.picker._caches[WORKER].stored[0, GPU]) == 1


@pytest.mark.usefixtures("sglang_context")
def test_all_chunks_of_a_cache_are_known():
    """By the events of a cache through which prompts go that it has no room for together."""
    loop = Loop(40, host_size=60)
    loop.tree_cache.enable_kv_cache_events = True
    told = Told()
    chunks = [A[1], B[1], (1, 2, 9, 9, 9), (20, 21), (1, 2, 9, 8)]
    held = set()
    for turn in range(12):
        parts = [(CHUNK, chunks[turn % 5]), (CHUNK, chunks[turn * 2 % 5]), QUESTION]
        loop.submit(parts, "r", max_new_tokens=1)
        loop.run()
        if turn % 4 == 3:
            loop.tree_cache.evict(EvictParams(num_tokens=9))
        if turn % 6 == 5:
            loop.tree_cache.evict_host(20)
        told.tell(*loop.tree_cache.take_events())
        nodes = [(node, before) for node, namespace, before in loop.pools.nodes() if namespace == PUBLIC]
        there = {(*before, *node.key.token_ids) for node, before in nodes}
        expected = [any(path[: len(chunk)] == chunk for path in there) for chunk in chunks]
        assert told.knows(*chunks) == expected, turn
        held.add(tuple(expected))
    assert len(held) > 3  # they came and went


BROKEN = [
    [],
    [b"", b"1"],
    [b"", (1).to_bytes(8, "big"), b"\xc1"],
    [b"", (1).to_bytes(8, "big"), b""],
    [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [["BlockSold", [1]]], 0])],
    [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [["BlockRemoved", "all"]], 0])],
    [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [["BlockStored"]], 0])],
    message(0, stored(SECOND)),  # of a worker that has started anew
    message(2, stored(SECOND)),  # one is missing
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_message_that_says_nothing_changes_nothing(broken):
    told = Told()
    told.tell(*stored(FIRST))
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        told.listener.take(broken)
    assert told.knows(FIRST, SECOND) == [True, False]


def test_fields_that_a_later_sglang_adds_are_passed_over():
    told = Told()
    event = ["BlockStored", [5], None, [1], 1, None, "GPU", "new"]
    told.listener.take([b"", bytes(8), msgspec.msgpack.encode([1.0, [event], 0, "new"])])
    assert told.picker._caches[WORKER].has(5)


class Worker:
    """What a picker sees of a server: where it publishes, how it tokenizes, and its messages."""

    def __init__(self, tokenizer):
        (self.port,) = free_ports(1)
        self.tokenizer, self.failures = tokenizer, []
        self.described = {
            "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": self.port, "topic": "", "block_size": 1,
            "dp_size": 1,
        }  # fmt: skip
        self.start()

    def start(self):
        self.number = 0
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.socket.bind(f"tcp://127.0.0.1:{self.port}")

    def stop(self):
        self.socket.close(linger=0)

    def publish(self, *events):
        self.socket.send_multipart(message(self.number, list(events)))
        self.number += 1

    def app(self):
        app = web.Application()
        app.router.add_get("/server_info", self.server_info)
        app.router.add_post("/tokenize", self.tokenize)
        return app

    async def server_info(self, _request):
        if self.failures:
            raise self.failures.pop()
        return web.json_response({"kv_events": self.described})

    async def tokenize(self, request):
        body = await request.json()
        tokens = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return web.json_response({"tokens": tokens})


async def until(condition, act=lambda: None):
    while not condition():
        act()
        await asyncio.sleep(0.02)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING, "sglang_lazy")  # SGLang's engines set the level of all
    return caplog


@pytest.fixture
def run(tiny_model, monkeypatch):
    monkeypatch.setattr(routing_events, "RETRY_S", 0.05)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)

    def run(test):
        async def running():
            worker, picker = Worker(tokenizer), Picker()
            async with TestServer(worker.app()) as server:
                url = str(server.make_url("")).rstrip("/")
                following = asyncio.create_task(follow(url, picker, BlockHashes(tokenizer)))
                await test(worker, picker, url, following)
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            worker.stop()

        asyncio.run(asyncio.wait_for(running(), 30))

    return run


async def followed(worker, picker, url):
    """Publish until something arrives: what is published before the picker listens is lost."""
    await until(lambda: knows(picker, (99,), url), lambda: worker.publish(*stored((99,))))
    worker.publish(*stored(FIRST))
    await until(lambda: knows(picker, FIRST, url))


def test_a_worker_is_followed(run):
    async def test(worker, picker, url, _following):
        await followed(worker, picker, url)
        worker.publish(*removed(FIRST))
        await until(lambda: not knows(picker, FIRST, url))
        assert knows(picker, (99,), url)

    run(test)


def test_a_worker_that_ends_is_forgotten_and_followed_when_it_is_back(run):
    async def test(worker, picker, url, _following):
        await followed(worker, picker, url)
        worker.stop()
        await until(lambda: not knows(picker, FIRST, url))
        worker.start()
        await followed(worker, picker, url)

    run(test)


@pytest.mark.parametrize(
    "send",
    [
        lambda worker: worker.socket.send(b"garbage"),
        lambda worker: worker.socket.send_multipart([b"", bytes(8), b"\xc1"]),
        lambda worker: worker.socket.send_multipart(message(worker.number + 1, [])),
        lambda worker: worker.socket.send_multipart(message(0, [])),
    ],
    ids=["garbage", "malformed", "one is missing", "it counts anew"],
)
def test_after_a_message_that_is_lost_nothing_is_known(run, send, log):
    async def test(worker, picker, url, following):
        await followed(worker, picker, url)
        send(worker)
        await until(lambda: not knows(picker, FIRST, url))
        assert "broke off" in log.text
        await followed(worker, picker, url)
        assert not following.done()

    run(test)


def change(**fields):
    def change(worker):
        worker.described = {**worker.described, **fields}

    return change


class Letters:
    def encode(self, text, add_special_tokens):
        return [*map(ord, text)]


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda worker: setattr(worker, "described", None), "--kv-events-config"),
        (change(block_size=16), "16 tokens"),
        (lambda worker: setattr(worker, "tokenizer", Letters()), "tokenizer is another"),
        (lambda worker: setattr(worker, "failures", [web.HTTPUnauthorized()]), "401"),
    ],
    ids=["no events", "blocks", "tokenizer", "key"],
)
def test_a_worker_that_nothing_can_be_learned_from(run, alter, reason, log):
    async def test(worker, picker, url, following):
        alter(worker)
        await following

    run(test)
    (record,) = [record for record in log.records if record.levelno == logging.ERROR]
    assert reason in record.getMessage()


def test_a_worker_that_does_not_answer_is_asked_again(run, log):
    """Meanwhile what answers have taught stays."""

    async def test(worker, picker, url, _following):
        worker.failures = [web.HTTPServiceUnavailable(), web.HTTPInternalServerError()]
        picker.pick({"sent": 1}, {url: 0})
        await followed(worker, picker, url)
        assert picker._caches[url].has("sent") and log.text.count("does not report") == 2

    run(test)

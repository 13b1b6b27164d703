"""What the picker learns from KV events: hand-made ones, a cache's, and those of workers that come and go."""

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
from sglang_lazy.port.cache.plain import BlockEvents
from sglang_lazy.routing import BlockHashes, Picker, follow
from sglang_lazy.routing import events as routing_events
from sglang_lazy.routing.events import Listener
from sglang_lazy.testing.server import free_ports

WORKER, OTHER = "http://worker", "http://other"
PUBLIC = Namespace("chunk", None, None)
GPU, CPU = StorageMedium.GPU, StorageMedium.CPU


def hashes(tokens):
    """SGLang's hash of each of these tokens' blocks at the start of a prompt."""
    return [hash_str_to_int64(name) for name in get_hash_str(list(tokens), None, page_size=1)]


def stored(tokens, after=0, medium=GPU):
    """Events that store these tokens; the first `after` were stored before."""
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
    """Whether the picker believes that the worker has the chunk of these tokens."""
    return picker._caches[worker].has(hashes(tokens)[-1])


class Told:
    """A picker, and the listener that feeds it events."""

    def __init__(self, **options):
        self.picker = Picker(**options)
        self.listener = Listener(WORKER, self.picker)
        self.numbers = [itertools.count(), itertools.count()]

    def tell(self, *events, rank=0):
        self.listener.take(message(next(self.numbers[rank]), list(events), rank))

    def knows(self, *chunks):
        return [knows(self.picker, tokens) for tokens in chunks]


FIRST, SECOND = (1, 2, 3, 4), (1, 2, 7)


def test_a_chunk_is_known_from_store_to_removal():
    told = Told()
    told.tell(*stored(FIRST), *stored(SECOND, after=2))
    assert told.knows(FIRST, SECOND, (1, 2, 8)) == [True, True, False]
    told.tell(*removed(FIRST, after=2))
    assert told.knows(FIRST, SECOND) == [False, True]
    told.tell(*stored((5, 6)), AllBlocksCleared(), *stored((8, 9)))
    assert told.knows(SECOND, (5, 6), (8, 9)) == [False, False, True]


def test_a_prompt_goes_where_its_chunks_were_stored():
    told = Told()
    told.tell(*stored(FIRST))
    for _ in range(3):
        assert told.picker.pick({hashes(FIRST)[-1]: 1}, {OTHER: 0, WORKER: 1}).worker == WORKER


def test_removal_events_overrule_earlier_requests():
    told = Told()
    name = hashes(FIRST)[-1]
    told.picker.pick({name: 1, "a tenant's": 1}, {WORKER: 0}).answered({name: False})
    told.tell(*stored(FIRST), *removed(FIRST))
    assert told.knows(FIRST) == [False] and told.picker._caches[WORKER].has("a tenant's")


def test_misses_do_not_overrule_events():
    """Workers evict by rules that the picker does not know: here most recently used first."""
    told = Told()
    told.tell(*stored(FIRST))
    first, second = hashes(FIRST)[-1], hashes(SECOND)[-1]
    told.picker.pick({first: 1}, {WORKER: 0}).answered({first: True})
    for _ in range(2):
        told.picker.pick({second: 1}, {WORKER: 0}).answered({second: False})
    assert told.knows(FIRST, SECOND) == [True, True]


def test_a_chunk_is_known_while_any_tier_or_rank_has_it():
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


def test_a_long_chunk_takes_one_entry():
    told = Told()
    told.tell(*stored(range(500)))
    assert len(told.picker._caches[WORKER].stored[0, GPU]) == 1


@pytest.mark.usefixtures("sglang_context")
def test_all_chunks_of_a_cache_are_known():
    """From the events of a real cache too small for all prompts together."""
    loop = Loop(40)
    cache, told = loop.tree_cache, Told()
    cache.events = BlockEvents()
    cache.tree.parts += (cache.events,)
    chunks = [A[1], B[1], (1, 2, 9, 9, 9), (20, 21), (1, 2, 9, 8)]
    held = set()
    for turn in range(12):
        parts = [(CHUNK, chunks[turn % 5]), (CHUNK, chunks[turn * 2 % 5]), QUESTION]
        loop.submit(parts, "r", max_new_tokens=1)
        loop.run()
        if turn % 4 == 3:
            cache.evict(EvictParams(num_tokens=9))
        told.tell(*cache.take_events())
        nodes = [(node, before) for node, namespace, before in loop.pools.nodes() if namespace == PUBLIC]
        there = {(*before, *node.tokens) for node, before in nodes}
        expected = [any(path[: len(chunk)] == chunk for path in there) for chunk in chunks]
        assert told.knows(*chunks) == expected, turn
        held.add(tuple(expected))
    assert len(held) > 3  # chunks came and went


BROKEN = [
    [],
    [b"", b"1"],
    [b"", (1).to_bytes(8, "big"), b"\xc1"],
    [b"", (1).to_bytes(8, "big"), b""],
    [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [{"type": "BlockSold", "block_hashes": [1]}], 0])],
    [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": "all"}], 0])],
    [b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0])],
    message(0, stored(SECOND)),  # from a restarted worker
    message(2, stored(SECOND)),  # a message is missing
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_broken_messages_change_nothing(broken):
    told = Told()
    told.tell(*stored(FIRST))
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        told.listener.take(broken)
    assert told.knows(FIRST, SECOND) == [True, False]


def test_unknown_fields_are_ignored():
    told = Told()
    (event,) = msgspec.to_builtins(stored([1]))
    told.listener.take([b"", bytes(8), msgspec.msgpack.encode([1.0, [{**event, "new": 1}], 0, "new"])])
    assert told.knows([1]) == [True]


class Worker:
    """A server as pickers see it: where it publishes, how it tokenizes, and its messages."""

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
    caplog.set_level(logging.WARNING, "sglang_lazy")  # SGLang's engines change every logger's level
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
    """Publish until something arrives: messages sent before the picker listens are lost."""
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


def test_a_worker_that_ends_is_forgotten_until_it_is_back(run):
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
    ids=["garbage", "malformed", "missing", "restarted"],
)
def test_a_lost_message_discards_all_knowledge(run, send, log):
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
        (lambda worker: setattr(worker, "tokenizer", Letters()), "different tokenizer"),
        (lambda worker: setattr(worker, "failures", [web.HTTPUnauthorized()]), "401"),
    ],
    ids=["no events", "blocks", "tokenizer", "key"],
)
def test_workers_whose_events_are_of_no_use(run, alter, reason, log):
    async def test(worker, picker, url, following):
        alter(worker)
        await following

    run(test)
    (record,) = [record for record in log.records if record.levelno == logging.ERROR]
    assert reason in record.getMessage()


def test_a_worker_that_does_not_answer_is_asked_again(run, log):
    """In the meantime, what answers have taught stays."""

    async def test(worker, picker, url, _following):
        worker.failures = [web.HTTPServiceUnavailable(), web.HTTPInternalServerError()]
        picker.pick({"sent": 1}, {url: 0})
        await followed(worker, picker, url)
        assert picker._caches[url].has("sent") and log.text.count("does not report") == 2

    run(test)

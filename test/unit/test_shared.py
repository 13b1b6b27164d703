"""State that tokenizer workers share: calls reach one object, and what a worker began ends with that worker."""

import threading
import time
from array import array
from multiprocessing.connection import Client

import pytest

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import Segment
from sglang_lazy.serving.known_chunks import KnownChunks, UnknownChunk, with_tokens
from sglang_lazy.serving.registration import Registrations, WorkerRegistrations
from sglang_lazy.serving.shared import ObjectServer, Proxy, connect
from sglang_lazy.testing.server import wait_for

DIGEST = "0123456789abcdef" * 4


class Counter:
    """Loses increments if two calls overlap."""

    def __init__(self):
        self.value = 0

    def count(self, amount):
        value = self.value
        time.sleep(0.001)
        self.value = value + amount
        return self.value


@pytest.fixture
def server():
    shared = {"counter": Counter(), "chunks": KnownChunks()}
    registrations = Registrations()
    return ObjectServer(lambda: {**shared, "registrations": WorkerRegistrations(registrations)})


def test_chunks_are_known_to_all_workers(server):
    one, other = (Proxy(connect(server.address), "chunks") for _ in range(2))
    name = chunk_id(tokens_digest([5, 6, 7]))
    segments = [{"type": "text", "text": "see"}, {"type": "chunk", "id": name}]
    with pytest.raises(UnknownChunk, match=f"chunk '{name}' is unknown"):
        with_tokens(other, segments, "tenant")
    one.add("tenant", [5, 6, 7])
    assert with_tokens(other, segments, "tenant") == [segments[0], Segment(True, input_ids=array("i", [5, 6, 7]))]
    assert other.remove("tenant", name)
    with pytest.raises(UnknownChunk):
        one.get("tenant", name)


def test_calls_do_not_overlap(server):
    def count():
        counter = Proxy(connect(server.address), "counter")
        for _ in range(25):
            counter.count(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Proxy(connect(server.address), "counter").count(0) == 100


def test_errors_are_raised_in_the_caller(server):
    counter = Proxy(connect(server.address), "counter")
    with pytest.raises(TypeError):
        counter.count("1")
    with pytest.raises(AttributeError):
        counter.close()
    assert counter.count(1) == 1


def test_a_wrong_key_is_rejected(server):
    with pytest.raises(Exception, match="digest"):
        Client(server.address, "AF_UNIX", authkey=b"another")
    assert Proxy(connect(server.address), "counter").count(1) == 1


def test_registrations_end_with_their_worker(server):
    """Those it had begun fail; those it had finished, and other workers', stay."""
    connection = connect(server.address)
    one, other = Proxy(connection, "registrations"), Proxy(connect(server.address), "registrations")
    digests = [f"{i}" + DIGEST[1:] for i in range(3)]
    for digest in digests[:2]:
        one.begin("tenant", [(digest, 5)])
    other.begin("tenant", [(digests[2], 5)])
    one.end("tenant", digests[0], 5, None)
    assert [other.get("tenant", digest) for digest in digests] == [None, {"state": "waiting"}, {"state": "waiting"}]
    connection.close()
    failed = {"state": "failed", "reason": "the tokenizer worker that registered it has ended"}
    assert wait_for(lambda: other.get("tenant", digests[1]) == failed)
    assert [other.get("tenant", digest) for digest in digests] == [None, failed, {"state": "waiting"}]
    assert other.forget("tenant", digests[1]) and other.get("tenant", digests[1]) is None

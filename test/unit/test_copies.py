"""Copies on the host: full tiers hold different chunks, and nothing is lost in transfer."""

import random

import pytest
from test_tiers import noted

from fakes.loop import QUESTION, Loop
from fakes.requests import CHUNK
from sglang_lazy.core.state import linked

pytestmark = pytest.mark.usefixtures("sglang_context")

DEVICE, HOST, LENGTH = 10, 10, 6


def corpus(count):
    """Chunks that all differ in their first token."""
    return [(CHUNK, (100 + i, *(1 + (i + j) % 7 for j in range(LENGTH - 1)))) for i in range(count)]


def new_server(**options):
    """A server with room for DEVICE chunks on the device, beside a prompt's text and answer, and for HOST on the
    host."""
    return Loop(**{"pool_size": DEVICE * LENGTH + 8, "host_size": HOST * LENGTH, "vocab_size": 1000, **options})


def ask(server, chunk):
    """The tier that had the chunk: device, host, or None."""
    req = server.submit([chunk, QUESTION], "r", max_new_tokens=1)
    server.run()
    details = linked(req)
    return "host" if details.num_loaded_tokens(fetched=False) else "device" if details.num_reused_tokens else None


def host_chunks(server):
    """How many chunks have a copy on the host, and how many of these are on the device as well."""
    nodes = [node for node, _, _ in server.pools.nodes() if node.host is not None]
    return len(nodes), sum(node.slots is not None for node in nodes)


def test_both_tiers_together_hold_the_corpus():
    """Cycling through more chunks than either tier holds: no chunk is computed twice."""
    server, chunks = new_server(), corpus(16)
    for chunk in chunks:
        assert ask(server, chunk) is None
    for _ in range(3):
        assert [ask(server, chunk) for chunk in chunks] == ["host"] * len(chunks)


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru"])
def test_tiers_hold_different_chunks(policy):
    """Random requests; `step` checks slots, locks and contents of both tiers."""
    server, chunks, dice = new_server(eviction_policy=policy), corpus(16), random.Random(0)
    found = [ask(server, chunks[dice.randrange(16)]) for _ in range(300)]
    assert found[100:].count(None) / 200 < 0.1, "with the same chunks in both tiers, 6 of 16 would miss"
    assert {"device", "host"} < set(found)


def test_a_host_with_room_keeps_all_copies():
    server, chunks = new_server(host_size=40 * LENGTH), corpus(30)
    for _ in range(2):
        for chunk in chunks:
            ask(server, chunk)
    assert host_chunks(server)[0] == 30


def test_hot_chunks_are_not_copied_again_to_a_full_host():
    """A chunk in constant use is copied once, not again at each use."""
    server, chunks = new_server(), corpus(18)
    written = noted(server, lambda node: tuple(node.tokens))
    hot = chunks[0]
    for chunk in chunks[1:] * 3:
        ask(server, chunk)
        assert ask(server, hot) in ("device", None)
    assert 1 <= written.count(hot[1]) <= 2


def test_a_beginning_keeps_its_copy_while_an_end_has_one():
    """Chunks that share a prefix: the host never holds an end without its beginning, which `step` checks."""
    server, dice = new_server(), random.Random(1)
    chunks = [(CHUNK, (first, 2, 3, last, last, last)) for first in (7, 8, 9) for last in (4, 5, 6, 10, 11)]
    for _ in range(150):
        ask(server, chunks[dice.randrange(len(chunks))])

"""The cost of reuse as a server's log shows it: passes, computed tokens, honest counts."""

import random
import re

import pytest

from oracle.segments import chunk, text, token_ids
from sglang_lazy.testing import Client


@pytest.fixture
def client(server):
    """The URL of an idle server with an empty cache, after SGLang's warm-up, so that the log has nothing else
    afterwards."""
    client = Client(server)
    client.generate({"input_ids": [5, 6, 7]}, 1)
    client.flush_cache()
    return client


def prefill_passes(log) -> list[int]:
    """Tokens computed by each prefill pass so far."""
    return [int(n) for n in re.findall(r"Prefill batch.*#new-token: (\d+)", log.read_text())]


def request(prompt) -> dict:
    return {"segments": [segment.to_request() for segment in prompt]}


def test_a_prompt_with_twenty_chunks_takes_one_pass(client, server_log):
    """Cold, all chunks and the text between them take one pass; warm, in any order, the pass has the text alone."""
    rng = random.Random(1)
    chunks = [chunk(rng.randrange(10, 500) for _ in range(rng.randint(5, 30))) for _ in range(20)]
    separator, question = text([11]), text([12, 13, 14, 15])

    def prompt():
        segments = [segment for one in chunks for segment in (one, separator)]
        return [*segments[:-1], question]

    num_chunk_tokens = sum(len(one.ids) for one in chunks)
    before = len(prefill_passes(server_log))
    cold = client.generate(request(prompt()), 4)
    cold_passes = prefill_passes(server_log)[before:]
    assert cold_passes == [cold.prompt_tokens] == [len(token_ids(prompt()))]
    assert (cold.chunk_tokens, cold.prefix_tokens) == (0, 0)
    for _ in range(3):
        rng.shuffle(chunks)
        before = len(prefill_passes(server_log))
        warm = client.generate(request(prompt()), 4)
        assert prefill_passes(server_log)[before:] == [19 + len(question.ids)]
        assert (warm.chunk_tokens, warm.prefix_tokens) == (num_chunk_tokens, 0)


def test_fills_obey_chunked_prefill(client, server_log):
    """A chunk longer than the prefill size takes several passes, the last one with the text after it."""
    long = chunk(10 + i % 480 for i in range(1300))
    before = len(prefill_passes(server_log))
    cold = client.generate(request([long, text([7, 8])]), 4)
    assert prefill_passes(server_log)[before:] == [512, 512, 278]
    assert cold.chunk_tokens == 0
    before = len(prefill_passes(server_log))
    warm = client.generate(request([text([7, 8, 9]), long, text([7, 8])]), 4)
    assert prefill_passes(server_log)[before:] == [5]
    assert (warm.chunk_tokens, warm.prefix_tokens) == (1300, 0)


def test_a_pool_that_holds_one_copy_serves_many_offsets(client, server_log):
    """Concurrent requests use one chunk at many offsets, in a pool that a copy for each would overflow."""
    big = chunk(10 + i % 450 for i in range(1200))  # the pool has room for six copies
    client.generate(request([big, text([9])]), 1)
    prompts = [request([text(range(20, 21 + i)), big, text([9, 8])])["segments"] for i in range(24)]
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    before = len(server_log.read_text())
    response = client.session.post(f"{client.url}/generate", json={"segments": prompts, "sampling_params": params})
    assert response.ok, response.text
    for answer in response.json():
        assert answer["meta_info"]["cached_tokens_details"]["chunk"] == 1200
    logged = server_log.read_text()[before:]
    running = [int(n) for n in re.findall(r"Decode batch.*#running-req: (\d+)", logged)]
    assert running and max(running) >= 12  # they did run concurrently
    assert "Retract" not in logged

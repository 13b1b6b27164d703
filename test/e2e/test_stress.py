"""A server with a pool barely large enough, under concurrent chunked requests and disconnecting clients."""

import asyncio
import random

import aiohttp
import pytest

from oracle.block_mask import Oracle, greedy
from oracle.segments import chunk, text, token_ids
from sglang_lazy.testing import device_flags, running_server

pytestmark = pytest.mark.slow  # servers of its own

POOL = 600
POOL_WITH_COPIES = 1100
NUM_REQUESTS = 200
NUM_PROMPTS = 24
MAX_NEW_TOKENS = 4


def make_prompts(rng: random.Random) -> list[list]:
    """Prompts of one to five chunks from a pool of ten, short text around them; a few without chunks."""

    def ids(low, high):
        return [rng.randrange(10, 500) for _ in range(rng.randint(low, high))]

    chunks = [chunk(ids(1, 90)) for _ in range(9)]
    chunks.append(chunk(chunks[0].ids + tuple(ids(5, 5))))  # begins like another
    prompts = []
    for i in range(NUM_PROMPTS):
        picked = rng.sample(chunks, rng.randint(1, 5)) if i % 6 else []
        prompt = [text(ids(1, 6))] if rng.random() < 0.7 or not picked else []
        for segment in picked:
            prompt += [segment] if rng.random() < 0.5 else [segment, text(ids(1, 3))]
        prompts.append(prompt)
    return prompts


@pytest.fixture(scope="module", params=["overlap", "no-overlap", "retraction", "copies"])
def small_server(request, tiny_model, tmp_path_factory):
    """retraction: SGLang takes running requests back every third step, whether memory is short or not.

    copies: the same where every request gets a copy of its chunks.
    """
    log = tmp_path_factory.mktemp("stress") / "server.log"
    pool = POOL_WITH_COPIES if request.param == "copies" else POOL
    flags = ["--model-path", tiny_model, "--max-total-tokens", str(pool), "--chunked-prefill-size", "64"]
    flags += ["--max-running-requests", "6", *device_flags()]
    flags += ["--disable-overlap-schedule"] if request.param == "no-overlap" else []
    flags += ["--lazy-default-link", "copy"] if request.param == "copies" else []
    with pytest.MonkeyPatch.context() as environment:
        if request.param in ("retraction", "copies"):
            environment.setenv("SGLANG_TEST_RETRACT", "true")
            environment.setenv("SGLANG_TEST_RETRACT_INTERVAL", "3")
        with running_server(flags, log) as url:
            yield url, log, request.param in ("retraction", "copies")


async def ask(session, url, prompt, disconnect_after=None):
    """The status and body of one request, or None where the client left before the answer."""
    body = {
        "segments": [segment.to_request() for segment in prompt],
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True},
    }
    timeout = aiohttp.ClientTimeout(total=disconnect_after or 240)
    try:
        async with session.post(f"{url}/generate", json=body, timeout=timeout) as response:
            return response.status, await response.json()
    except asyncio.TimeoutError:
        assert disconnect_after is not None, "a request hung"
        return None


async def storm(url, prompts, rng):
    """All requests at once; a quarter of the clients leave early, some ask for more than the pool holds."""
    too_long = [chunk([20 + i % 400 for i in range(POOL_WITH_COPIES)]), text([11, 12])]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        jobs = []
        for i in range(NUM_REQUESTS):
            prompt = too_long if i % 40 == 7 else rng.choice(prompts)
            leaves = rng.uniform(0.05, 4) if i % 4 == 1 else None
            jobs.append((prompt, ask(session, url, prompt, leaves)))
        answers = await asyncio.gather(*(job for _, job in jobs))
        async with session.post(f"{url}/flush_cache", params={"timeout": 30}) as response:
            flushed = response.status
        again = await ask(session, url, prompts[1])
    return [(prompt, answer) for (prompt, _), answer in zip(jobs, answers, strict=True)], too_long, flushed, again


def test_every_request_is_answered_right_or_refused(small_server, tiny_model):
    """No 500, no hang, no wrong token; afterwards the server is idle with nothing leaked or locked, and serves on."""
    url, log, takes_back = small_server
    rng = random.Random(0)
    prompts = make_prompts(rng)
    oracle = Oracle(tiny_model)
    expected = {}
    for prompt in prompts:
        tokens = expected[token_key(prompt)] = oracle.generate(prompt, MAX_NEW_TOKENS)[0]
        assert greedy(oracle.logprobs(prompt, tokens[:-1])) == tokens
    answers, too_long, flushed, again = asyncio.run(storm(url, prompts, rng))
    served = 0
    for prompt, answer in answers:
        if answer is None:
            continue
        status, body = answer
        if prompt is too_long:
            assert status == 400, body
            continue
        assert status == 200, body
        assert body["output_ids"] == expected[token_key(prompt)]
        assert body["meta_info"]["prompt_tokens"] == len(token_ids(prompt))
        served += 1
    assert served >= NUM_REQUESTS // 2
    assert ("Testing retraction" in log.read_text()) == takes_back
    # An idle server checks its own accounts, ours included, and dies of a leak or a forgotten lock.
    assert flushed == 200, log.read_text()[-2000:]
    assert again[0] == 200 and again[1]["output_ids"] == expected[token_key(prompts[1])]
    assert again[1]["meta_info"]["cached_tokens"] == 0


def token_key(prompt) -> tuple:
    return tuple((segment.kind, segment.ids) for segment in prompt)

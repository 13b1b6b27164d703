"""A server and an engine with two data-parallel ranks: prompts follow their chunks, answers are right, and the chunk
routes reach both ranks."""

import asyncio
import copy
import itertools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from http_prompts import LIBRARY, RAILWAY, RIVER, call, chunk, text
from served import TWO_RANKS

from oracle import segments as oracle_segments
from oracle.block_mask import MIN_GAP, Oracle
from sglang_lazy.routing import BlockHashes, Picker, chunks_in, follow
from sglang_lazy.testing import device_flags, device_options, running_server
from sglang_lazy.testing.server import free_ports
from support.engine import EngineProcess

pytestmark = pytest.mark.slow  # starts a server and an engine; test/unit/test_ranks.py needs neither

NEW = itertools.count()
NUM_TOKENS = 6
GREEDY = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def environment():
    with pytest.MonkeyPatch.context() as environment:
        for name, value in TWO_RANKS.items():
            environment.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def url(tiny_model, tmp_path_factory):
    flags = ["--model-path", tiny_model, "--dp-size", "2", "--max-total-tokens", "4000", *device_flags()]
    port, _ = free_ports(2)  # the other rank publishes on the next port
    flags += ["--kv-events-config", json.dumps({"publisher": "zmq", "endpoint": f"tcp://*:{port}"})]
    with running_server(flags, tmp_path_factory.mktemp("data-parallel") / "server.log") as url:
        yield url


def generate(url, segments, **body):
    return call(url, "/generate", segments=segments, sampling_params=GREEDY, **body)


def where(answer) -> tuple[int, list[bool]]:
    """The rank that answered, and the hits of its chunks."""
    return answer["meta_info"]["dp_rank"], [one["hit"] for one in answer["meta_info"]["chunks"]]


def prompt(*documents):
    return [text("Read: "), *map(chunk, documents), text(" Which town?")]


def even_out(url):
    """Send new chunks until both ranks have had about as many, so that the next ones alternate."""
    before = None
    for number in itertools.islice(NEW, 40):
        rank, _ = where(generate(url, prompt(f"This is town {number}.")))
        if before not in (None, rank):
            return
        before = rank
    raise AssertionError("all went to one rank")


@pytest.fixture(scope="module")
def prompts(tiny_model):
    """Prompts of two chunks, in both orders, each with the oracle's answer."""
    rng, oracle = random.Random(0), Oracle(tiny_model)
    documents = [tuple(rng.randrange(10, 500) for _ in range(rng.randint(5, 40))) for _ in range(12)]
    pairs = [documents[index : index + 2] for index in range(0, 12, 2)]
    prompts = []
    while len(prompts) < 24:
        first, second = rng.sample(rng.choice(pairs), 2)
        question = [rng.randrange(10, 500) for _ in range(8)]
        segments = [oracle_segments.chunk(first), oracle_segments.chunk(second), oracle_segments.text(question)]
        tokens, _ = oracle.generate(segments, NUM_TOKENS)
        best = oracle.logprobs(segments, tokens[:-1]).topk(2).values
        if (best[:, 0] - best[:, 1]).min() >= MIN_GAP:
            prompts.append(([segment.to_request() for segment in segments], tokens))
    return prompts


def check_against_oracle(prompts, answers, listed):
    """All answers are right, both ranks gave some, and every chunk is listed exactly once."""
    assert [answer["output_ids"] for answer in answers] == [tokens for _, tokens in prompts]
    assert {where(answer)[0] for answer in answers} == {0, 1}
    used = {tuple(segment["input_ids"]) for segments, _ in prompts for segment in segments[:2]}
    assert len(listed) == len({chunk["id"] for chunk in listed}) == len(used)
    assert {chunk["dp_rank"] for chunk in listed} == {0, 1}


def test_both_ranks_answer_rightly_and_chunks_are_computed_once(url, prompts):
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda one: generate(url, one[0], cache_salt="oracle"), prompts))
    check_against_oracle(prompts, answers, call_chunks(url, "oracle", limit=1000)["chunks"])


def call_chunks(url, salt, path="", **query):
    response = requests.get(f"{url}/chunks{path}", params={"cache_salt": salt, **query}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_prompt_follows_its_chunks_on_every_api(url):
    even_out(url)
    salt = {"cache_salt": "follows"}
    homes = {}
    for document in (RIVER, RAILWAY, LIBRARY):
        homes[document], hits = where(generate(url, prompt(document), **salt))
        assert hits == [False]
    assert set(homes.values()) == {0, 1}  # unknown chunks are spread over both ranks
    for document, home in homes.items():
        assert where(generate(url, prompt(document), **salt)) == (home, [True])
        batch = generate(url, [prompt(document), [chunk(document), text("Why?")]], **salt)
        assert [where(answer) for answer in batch] == [(home, [True])] * 2
        samples = call(url, "/generate", segments=prompt(document), sampling_params={**GREEDY, "n": 3}, **salt)
        assert [where(answer) for answer in samples] == [(home, [True])] * 3
        content = [{"type": "chunk", "text": document}, {"type": "text", "text": "Who?"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "return_meta_info": True, **salt}
        chat = call(url, "/v1/chat/completions", model="tiny", **body)
        assert where(chat["choices"][0]) == (home, [True])
    # Each adapter, preamble and tenant has its own chunks, so none follows another's.
    assert where(generate(url, prompt(RIVER), link="base", **salt))[1] == [False]
    assert where(generate(url, prompt(RIVER), cache_salt="another"))[1] == [False]


def test_a_request_may_name_its_rank(url):
    salt = {"cache_salt": "named"}
    home, _ = where(generate(url, prompt(RIVER), **salt))
    assert where(generate(url, prompt(RIVER), routed_dp_rank=1 - home, **salt)) == (1 - home, [False])
    assert where(generate(url, prompt(RIVER), routed_dp_rank=home, **salt)) == (home, [True])
    full = generate(url, prompt(RIVER), link="full", **salt)
    assert full["output_ids"] and "chunks" not in full["meta_info"]


def test_chunk_routes_reach_both_ranks(url):
    even_out(url)
    salt, headers = "routes", {"X-Cache-Salt": "routes"}
    body = {"chunks": [RIVER, RAILWAY, LIBRARY], "wait": True, "pin": True}
    registered = requests.post(f"{url}/chunks", json=body, headers=headers, timeout=60).json()
    assert registered["skipped"] == [] and len(registered["affected"]) == 3
    listed = call_chunks(url, salt)["chunks"]
    assert {one["dp_rank"] for one in listed} == {0, 1} and all(one["pinned"] for one in listed)
    name = registered["affected"][0]
    (home,) = [one["dp_rank"] for one in listed if one["id"] == name]
    named = [{"type": "chunk", "id": name}, text(" Which town?")]
    assert where(generate(url, named, cache_salt=salt)) == (home, [True])
    assert where(generate(url, named, cache_salt=salt, routed_dp_rank=1 - home)) == (1 - home, [False])
    both = call_chunks(url, salt, f"/{name}")["chunks"]
    assert [(one["dp_rank"], one["pinned"]) for one in both] == [(0, home == 0), (1, home == 1)]
    pages, cursor = [], None
    while cursor is not None or not pages:
        query = {} if cursor is None else {"cursor": cursor}
        page = call_chunks(url, salt, sort="tokens", limit=1, **query)
        pages += [(one["id"], one["dp_rank"]) for one in page["chunks"]]
        cursor = page["next"]
    assert len(set(pages)) == len(pages) == page["total"] == 4
    path = f"{url}/chunks/{name}"
    assert requests.patch(path, json={"pin": True}, headers=headers, timeout=60).status_code == 200
    assert all(one["pinned"] for one in call_chunks(url, salt, f"/{name}")["chunks"])
    assert requests.delete(path, headers=headers, timeout=60).json()["affected"] == [{"id": name, "state": "deleted"}]
    assert requests.get(path, headers=headers, timeout=60).status_code == 404
    assert call_chunks(url, salt)["total"] == 2


def test_the_events_of_both_ranks_are_followed(url, tiny_model):
    """By a picker that sees the server as one worker."""
    picker, hashes = Picker(), BlockHashes.load(tiny_model)

    def known(document):
        chunks = dict(chunks_in({"segments": prompt(document)}, hashes))
        return copy.deepcopy(picker).pick(chunks, {url: 1, "another": 0}).worker == url

    async def learn(rank):
        """Send documents to this rank until one is known: events before the picker listens are lost."""
        for number in NEW:
            document = f"This is town {number}."
            await asyncio.to_thread(generate, url, prompt(document), routed_dp_rank=rank)
            await asyncio.sleep(0.1)
            if known(document):
                return

    async def run():
        following = asyncio.create_task(follow(url, picker, hashes))
        await asyncio.wait_for(asyncio.gather(learn(0), learn(1)), 60)
        following.cancel()

    asyncio.run(run())


@pytest.fixture(scope="module")
def engine(tiny_model):
    engine = EngineProcess(model_path=tiny_model, dp_size=2, max_total_tokens=4000, **device_options())
    yield engine
    engine.shutdown()


def test_an_engine_answers_rightly_and_prompts_follow_their_chunks(engine, prompts):
    def ask(some):
        segments = [segments for segments, _ in some]
        return engine.generate(segments=segments, cache_salt="oracle", sampling_params=GREEDY)

    answers = [answer for start in range(0, len(prompts), 4) for answer in ask(prompts[start : start + 4])]
    listed = engine.call("list_chunks", cache_salt="oracle", limit=1000)["chunks"]
    check_against_oracle(prompts, answers, listed)
    homes = {one["id"]: one["dp_rank"] for one in listed}
    for answer, (_, tokens) in zip([answer for prompt in prompts for answer in ask([prompt])], prompts, strict=True):
        rank, hits = where(answer)
        assert {homes[one["id"]] for one in answer["meta_info"]["chunks"]} == {rank} and hits == [True, True]
        assert answer["output_ids"] == tokens


def test_an_engines_chunk_methods_reach_both_ranks(engine):
    def call(name, **arguments):
        return engine.call(name, **arguments, cache_salt="methods")

    registered = call("register_chunks", chunks=[RIVER, RAILWAY, LIBRARY], pin=True)
    assert registered["skipped"] == [] and len(registered["affected"]) == 3
    listed = call("list_chunks")["chunks"]
    assert {one["dp_rank"] for one in listed} == {0, 1} and all(one["pinned"] for one in listed)
    name = registered["affected"][0]
    (home,) = [one["dp_rank"] for one in listed if one["id"] == name]
    for rank, hits in ((None, [True]), (1 - home, [False])):
        segments = [{"type": "chunk", "id": name}, text(" Which town?")]
        answer = engine.generate(segments=segments, cache_salt="methods", sampling_params=GREEDY, routed_dp_rank=rank)
        assert where(answer) == (home if rank is None else rank, hits)
    both = call("get_chunk", chunk_id=name)["chunks"]
    assert [(one["dp_rank"], one["pinned"]) for one in both] == [(0, home == 0), (1, home == 1)]
    assert call("pin_chunks", ids=[name])["skipped"] == []
    assert all(one["pinned"] for one in call("get_chunk", chunk_id=name)["chunks"])
    assert call("delete_chunks", ids=[name])["affected"] == [{"id": name, "state": "deleted"}]
    assert call("list_chunks")["total"] == 2
    call("pin_chunks", ids=registered["affected"][1:], pin=False)
    engine.flush_cache()
    assert call("list_chunks")["total"] == 0

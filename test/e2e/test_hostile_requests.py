"""Requests that few clients send, and clients that leave: answered rightly or refused, leaving nothing behind.

At the end of each test the server is idle: it then checks its accounting, and a leaked slot or lock ends it.
"""

import contextlib
import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from oracle.block_mask import Oracle, greedy
from oracle.scenarios import Dice
from oracle.segments import chunk
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.testing import Client, device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = pytest.mark.slow  # starts a server

POOL = 1600
PREFILL_SIZE = 8
MAX_CHUNKS = 1200
PATIENCE = 60  # seconds
NUM_TOKENS = 4


@pytest.fixture(scope="module")
def server(tiny_model, tmp_path_factory):
    """It runs few requests at a time, and a long chunk takes many passes."""
    log = tmp_path_factory.mktemp("hostile") / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", str(POOL), "--max-running-requests", "2"]
    flags += ["--chunked-prefill-size", str(PREFILL_SIZE), "--lazy-max-chunks", str(MAX_CHUNKS), *device_flags()]
    with running_server(flags, log) as url:
        yield url, log


@pytest.fixture
def url(server):
    url, log = server
    Client(url).flush_cache()
    yield url
    assert requests.post(f"{url}/flush_cache?timeout=30", timeout=PATIENCE).ok, log.read_text()[-2000:]
    assert requests.get(f"{url}/chunks", timeout=PATIENCE).json()["total"] == 0


@pytest.fixture(scope="module")
def oracle(tiny_model):
    return Oracle(tiny_model)


def body(prompt, num_tokens=NUM_TOKENS, **more):
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    return {"segments": [segment.to_request() for segment in prompt], "sampling_params": params, **more}


def ask(url, prompt, **more) -> requests.Response:
    return requests.post(f"{url}/generate", json=body(prompt, **more), timeout=PATIENCE)


def check_answer(oracle, prompt, answer, num_tokens=NUM_TOKENS) -> None:
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["output_ids"]
    assert len(tokens) == num_tokens and greedy(oracle.logprobs(prompt, tokens[:-1])) == tokens


def state_of(url, segment) -> dict:
    """What the server reports about a chunk; {} if it does not know it."""
    answer = requests.get(f"{url}/chunks/{chunk_id(tokens_digest(segment.ids))}", timeout=PATIENCE)
    return answer.json()["chunks"][0] if answer.ok else {}


def load_of(url) -> dict:
    return requests.get(f"{url}/v1/loads", timeout=PATIENCE).json()["loads"][0]


def refusal(answer) -> str:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["message"]


# Clients that leave


def test_a_client_leaves_in_mid_stream(url, oracle):
    """Before the first token and after some: the locks on its chunks are released."""
    dice = Dice("leaves")
    document, question = dice.chunk(40), dice.text(5)
    for num_lines in (0, 3):
        with requests.post(
            f"{url}/generate", json=body([document, question], 1400, stream=True), stream=True, timeout=PATIENCE
        ) as response:
            lines = filter(None, response.iter_lines())
            for _ in range(num_lines):
                assert json.loads(next(lines).removeprefix(b"data: "))["output_ids"]
                assert state_of(url, document)["users"] == 1
        assert wait_for(lambda: state_of(url, document).get("users", 0) == 0, PATIENCE)
        check_answer(oracle, [document, question], ask(url, [document, question]))


# Fills


@contextlib.contextmanager
def busy(url, clients, dice):
    """Keeps the server computing a long plain prompt, so that nothing else runs, until that is aborted."""
    plain = {"input_ids": dice.ids(150 * PREFILL_SIZE), "sampling_params": {"max_new_tokens": 1}, "rid": "busy"}
    answer = clients.submit(requests.post, f"{url}/generate", json=plain, timeout=PATIENCE)
    assert wait_for(lambda: load_of(url)["num_used_tokens"] > 0, PATIENCE)
    yield
    assert not answer.done()
    abort(url, rid="busy")
    answer.result()


def three_parents(url, clients, document, dice):
    """Three requests that wait for one chunk, as prompts and futures of answers. The first one's fill computes the
    chunk."""
    prompts = [[dice.text(n), document, dice.text(4)] for n in (2, 3, 4)]
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(clients.submit(ask, url, prompt, rid=f"parent-{number}"))
        if not number:
            assert wait_for(lambda: state_of(url, document).get("state") == "pending", PATIENCE)
    assert wait_for(lambda: load_of(url)["num_waiting_reqs"] == len(prompts), PATIENCE)
    return prompts, answers


def abort(url, **which) -> None:
    requests.post(f"{url}/abort_request", json=which, timeout=PATIENCE).raise_for_status()


def is_aborted(answer) -> bool:
    return answer.json()["meta_info"]["finish_reason"]["type"] == "abort" if answer.ok else True


def test_a_fill_goes_with_its_owner_while_two_others_wait(url, oracle):
    """It has not started, so the two others get a new one."""
    dice = Dice("owner leaves")
    document = dice.chunk(60)
    with ThreadPoolExecutor() as clients:
        with busy(url, clients, dice):
            prompts, answers = three_parents(url, clients, document, dice)
            abort(url, rid="parent-0")
            assert is_aborted(answers[0].result())
        for prompt, answer in zip(prompts[1:], answers[1:], strict=True):
            check_answer(oracle, prompt, answer.result())


def test_a_fill_that_has_started_outlives_its_owner(url, oracle):
    dice = Dice("started")
    document = dice.chunk(150 * PREFILL_SIZE)
    with ThreadPoolExecutor() as clients:
        prompts, answers = three_parents(url, clients, document, dice)
        abort(url, rid="parent-0")
        for prompt, answer in zip(prompts[1:], answers[1:], strict=True):
            check_answer(oracle, prompt, answer.result())
        answers[0].result()


@pytest.mark.parametrize("started", [False, True])
def test_a_fill_is_aborted_while_three_parents_wait(url, oracle, started):
    """Together with them: none hangs, and the part computed so far must not pass for the chunk."""
    dice = Dice(f"aborted {started}")
    document = dice.chunk(150 * PREFILL_SIZE if started else 60)
    with ThreadPoolExecutor() as clients:
        with contextlib.nullcontext() if started else busy(url, clients, dice):
            prompts, answers = three_parents(url, clients, document, dice)
            for number in range(len(prompts)):
                abort(url, rid=f"parent-{number}")
        assert all(is_aborted(answer.result()) for answer in answers)
    answer = ask(url, prompts[1])
    check_answer(oracle, prompts[1], answer)
    assert [entry["hit"] for entry in answer.json()["meta_info"]["chunks"]] == [False]


# Prompts


@pytest.mark.parametrize("input_ids", [[[]], [[], [5, 6]]])
@pytest.mark.parametrize("n", [1, 2])
def test_an_empty_prompt_is_refused(url, oracle, input_ids, n):
    """Alone in a pass, it would end SGLang's scheduler."""
    plain = {"input_ids": input_ids, "sampling_params": {"max_new_tokens": 3, "n": n}}
    assert "the prompt is empty" in refusal(requests.post(f"{url}/generate", json=plain, timeout=PATIENCE))
    prompt = [Dice("not empty").text(3), Dice("not empty either").chunk(20), chunk([5])]
    check_answer(oracle, prompt, ask(url, prompt))


def test_ten_thousand_chunks_are_refused(url, oracle):
    dice = Dice("ten thousand")
    chunks = [dice.chunk(1) for _ in range(10_000)]
    prompt = [dice.text(3), *chunks, dice.text(3)]
    assert f"the prompt has more than the {MAX_CHUNKS} chunks" in refusal(ask(url, prompt))
    assert "context length" in refusal(ask(url, prompt, link="full"))
    prompt = [dice.text(3), *chunks[:5], dice.text(3)]
    check_answer(oracle, prompt, ask(url, prompt))


def test_as_many_chunks_as_are_allowed(url, oracle):
    dice = Dice("many")
    prompt = [dice.text(3), *(dice.chunk(1) for _ in range(MAX_CHUNKS)), dice.text(3)]
    for _ in range(2):
        check_answer(oracle, prompt, ask(url, prompt))


def test_a_chunk_as_long_as_the_pool(url, oracle):
    """It is refused. The longest input that SGLang takes is answered, even when another chunk must be evicted for
    it."""
    dice = Dice("pool")
    question, whole, other = dice.text(3), dice.chunk(POOL), dice.chunk(30)
    longest = int(re.search(r"maximum allowed length \((\d+) tokens", refusal(ask(url, [whole, question]))).group(1))
    assert longest > 0.99 * POOL
    check_answer(oracle, [other, question], ask(url, [other, question]))
    prompt = [chunk(whole.ids[: longest - 4]), question]
    check_answer(oracle, prompt, ask(url, prompt, num_tokens=1), num_tokens=1)

"""SGLang's limits on waiting, which prompts that wait for their chunks count for: one that exceeds them gets an error
and leaves nothing behind."""

import contextlib
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from oracle.block_mask import Oracle, greedy
from oracle.scenarios import Dice
from sglang_lazy.testing import Client, device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = pytest.mark.slow  # `test/unit` checks after every step what waiting requests leave behind

LIMIT = 2  # seconds
PREFILL_SIZE = 8
MAX_NEW_TOKENS = 4


@pytest.fixture(scope="module")
def impatient_server(tiny_model, tmp_path_factory):
    """It runs one request at a time, and a long chunk takes many passes."""
    log = tmp_path_factory.mktemp("waiting") / "server.log"
    flags = ["--model-path", tiny_model, "--max-total-tokens", "4000", "--max-running-requests", "1"]
    flags += ["--chunked-prefill-size", str(PREFILL_SIZE), *device_flags()]
    with running_server(flags, log, environment={"SGLANG_REQ_WAITING_TIMEOUT": str(LIMIT)}) as url:
        yield url, log


def ask(url, prompt, stream=False) -> requests.Response:
    body = {
        "segments": [segment.to_request() for segment in prompt],
        "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True},
        "stream": stream,
    }
    return requests.post(f"{url}/generate", json=body, timeout=60)


def check_answer(url, oracle, prompt, hits) -> None:
    check(ask(url, prompt), oracle, prompt, hits)


def check(answer, oracle, prompt, hits) -> None:
    assert answer.status_code == 200, answer.text
    tokens = answer.json()["output_ids"]
    assert len(tokens) == MAX_NEW_TOKENS and greedy(oracle.logprobs(prompt, tokens[:-1])) == tokens
    assert [entry["hit"] for entry in answer.json()["meta_info"]["chunks"]] == hits


def check_refusal(answer) -> None:
    assert answer.status_code == 503 and "waiting timeout" in answer.text, answer.text


@contextlib.contextmanager
def busy(url):
    """A plain request that runs until its client leaves."""
    params = {"temperature": 0, "max_new_tokens": 1900, "ignore_eos": True}
    body = {"input_ids": [7, 8, 9], "sampling_params": params, "stream": True}
    with requests.post(f"{url}/generate", json=body, stream=True, timeout=60) as response:
        lines = response.iter_lines()  # kept: without a reader the connection is closed
        assert next(lines).startswith(b"data: ")
        yield


def test_limit_while_another_request_runs(impatient_server, tiny_model):
    """Locks on resident chunks are released, and a fill that has not started is dropped. Streams end with the error."""
    url, _ = impatient_server
    oracle, dice = Oracle(tiny_model), Dice("another runs")
    resident, missing, question = dice.chunk(30), dice.chunk(20), dice.text(5)
    check_answer(url, oracle, [resident, question], [False])
    prompt = [resident, missing, question]
    with busy(url), ThreadPoolExecutor() as clients:
        whole, streamed = clients.map(lambda stream: ask(url, prompt, stream), [False, True])
    check_refusal(whole)
    event, done = streamed.text.strip().split("\n\n")
    finish_reason = json.loads(event.removeprefix("data: "))["meta_info"]["finish_reason"]
    assert (finish_reason["type"], finish_reason["status_code"]) == ("abort", 503) and done == "data: [DONE]"
    check_answer(url, oracle, prompt, [True, False])
    # The flush waits until the server is idle; it then checks its accounting, and a leaked lock ends it.
    Client(url).flush_cache()
    check_answer(url, oracle, prompt, [False, False])


def test_limit_while_the_fill_runs(impatient_server, tiny_model):
    """A fill that has started ends as well, with nobody left to wait for it."""
    url, log = impatient_server
    oracle, dice = Oracle(tiny_model), Dice("fill runs")

    def full_passes() -> int:
        return log.read_text().count(f"#new-token: {PREFILL_SIZE},")

    before = full_passes()
    with ThreadPoolExecutor() as clients:
        late = clients.submit(ask, url, [dice.chunk(100 * PREFILL_SIZE), dice.text(3)])
        while full_passes() == before:
            assert not late.done(), late.result().text
            time.sleep(0.01)
        # On a machine of any speed, the limit is reached in the middle of the fill.
        requests.post(f"{url}/pause_generation", json={"mode": "in_place"}, timeout=60).raise_for_status()
        time.sleep(LIMIT)
        requests.post(f"{url}/continue_generation", json={}, timeout=60).raise_for_status()
        check_refusal(late.result())
    Client(url).flush_cache()
    assert full_passes() < before + 100
    check_answer(url, oracle, [dice.chunk(20), dice.text(4)], [False])


def test_prompts_that_wait_for_chunks_count_as_queued(tiny_model, tmp_path):
    """In SGLang's gauge, and where it limits the queue."""
    flags = ["--model-path", tiny_model, "--max-total-tokens", "4000", "--enable-metrics", *device_flags()]
    flags += ["--chunked-prefill-size", str(PREFILL_SIZE), "--max-queued-requests", "2"]
    oracle, dice = Oracle(tiny_model), Dice("queued")
    document = dice.chunk(240 * PREFILL_SIZE)
    prompts = [[document, dice.text(3)] for _ in range(2)]
    with running_server(flags, tmp_path / "server.log") as url, ThreadPoolExecutor() as clients:

        def num_queued() -> float:
            metrics = requests.get(f"{url}/metrics", timeout=60).text
            return sum(map(float, re.findall(r"^sglang:num_queue_reqs\{.*\} (\S+)$", metrics, re.M)))

        waiting = [clients.submit(ask, url, prompt) for prompt in prompts]
        assert wait_for(lambda: num_queued() == 2)
        refused = ask(url, [document, dice.text(4)])  # the chunk takes many passes more
        assert refused.status_code == 503 and "queue is full" in refused.text, refused.text
        for prompt, answer in zip(prompts, waiting, strict=True):
            check(answer.result(), oracle, prompt, [False])

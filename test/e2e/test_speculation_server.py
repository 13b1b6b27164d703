"""A server that drafts, with a pool for few of its requests: many are retracted, some clients leave."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
import torch

from fakes import leftovers, speculation_on_cpu
from oracle.block_mask import Oracle
from oracle.models import MODELS
from oracle.models.build import build
from oracle.models.drafts import build_draft
from oracle.scenarios import Dice
from sglang_lazy.testing import device_flags, running_server
from sglang_lazy.testing.server import wait_for

pytestmark = [
    pytest.mark.slow,  # starts a server
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

PATIENCE = 120  # seconds
POOL, NUM_TOKENS, TOLERANCE = 600, 100, 1e-4


@pytest.fixture(scope="module", params=["overlap", pytest.param("synchronous", marks=pytest.mark.nightly)])
def server(request, model_dir, with_plugin, tmp_path_factory):
    """Its address and log. SGLang retracts requests in every third step, as it does when memory runs out."""
    target, log = build("llama", model_dir), tmp_path_factory.mktemp("drafts") / "server.log"
    options = {
        **speculation_on_cpu.OPTIONS,
        "model_path": target,
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": build_draft("STANDALONE", target, model_dir),
        "max_total_tokens": POOL,
        "max_running_requests": 6,
        "chunked_prefill_size": 64,
    }
    flags = [*device_flags(), "--disable-cuda-graph"]
    for option, value in options.items():
        flags += [f"--{option.replace('_', '-')}", str(value)]
    if request.param == "synchronous":
        flags.append("--disable-overlap-schedule")
    with (
        with_plugin(speculation_on_cpu.load),
        with_plugin(leftovers.load),
        running_server(flags, log, environment={"SGLANG_TEST_RETRACT": "1"}) as url,
    ):
        yield url, log


@pytest.fixture
def url(server):
    url, log = server
    yield url
    assert requests.post(f"{url}/flush_cache?timeout=30", timeout=PATIENCE).ok, log.read_text()[-2000:]
    held = requests.get(f"{url}/server_info", timeout=PATIENCE).json()["internal_states"][0][leftovers.NAME]
    assert not any(count for name, count in held.items() if name not in (leftovers.PASSES, "launched")), held


@pytest.fixture(scope="module")
def oracle(model_dir):
    return Oracle(build("llama", model_dir))


def body(prompt, num_tokens=NUM_TOKENS, **more):
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    segments = [segment.to_request() for segment in prompt]
    return {"segments": segments, "sampling_params": params, "return_logprob": True, **more}


def check(oracle, prompt, answer, num_tokens=NUM_TOKENS):
    assert answer.status_code == 200, answer.text
    tokens, meta = answer.json()["output_ids"], answer.json()["meta_info"]
    assert len(tokens) == num_tokens
    expected = oracle.logprobs(prompt, tokens[:-1])
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (expected.amax(-1) - chosen).max() <= TOLERANCE
    assert (chosen - torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])).abs().max() <= TOLERANCE


def prompts_of(dice, count):
    """Prompts over three documents, and some without."""
    docs = dice.chunks(3, 20, 40)
    linked = [[dice.text(4), *dice.shuffled(docs)[:2], dice.text(5)] for _ in range(count)]
    return [prompt if i % 3 else [dice.text(40)] for i, prompt in enumerate(linked, 1)]


def test_a_list_tells_what_the_draft_keeps_of_a_chunk(url):
    """Keys and values of each layer, in fp32."""
    dice = Dice("listed")
    chunk = dice.chunk(30)
    answer = requests.post(f"{url}/generate", json=body([chunk, dice.text(4)], 4), timeout=PATIENCE)
    (wanted,) = answer.json()["meta_info"]["chunks"]
    (listed,) = requests.get(f"{url}/chunks/{wanted['id']}", timeout=PATIENCE).json()["chunks"]
    config = MODELS["llama"].config()
    per_token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2 * 4
    assert listed["draft_bytes"] == len(chunk.ids) * per_token


def test_requests_that_are_retracted(url, server, oracle):
    prompts = prompts_of(Dice("retracted"), 9)
    with ThreadPoolExecutor(len(prompts)) as clients:
        asked = [clients.submit(requests.post, f"{url}/generate", json=body(p), timeout=PATIENCE) for p in prompts]
        for prompt, answer in zip(prompts, asked, strict=True):
            check(oracle, prompt, answer.result())
    assert re.search(r"#retracted_reqs: [1-9]", server[1].read_text())


def test_clients_that_leave(url, oracle):
    """In the middle of an answer, or by name; the others are answered rightly."""
    prompts = prompts_of(Dice("leaving"), 6)
    with ThreadPoolExecutor(len(prompts)) as clients:
        stays = [
            clients.submit(requests.post, f"{url}/generate", json=body(p, rid=f"stays {i}"), timeout=PATIENCE)
            for i, p in enumerate(prompts[3:])
        ]
        named = clients.submit(
            requests.post, f"{url}/generate", json=body(prompts[0], 400, rid="named"), timeout=PATIENCE
        )
        for prompt in prompts[1:3]:
            streamed = body(prompt, 400, stream=True)
            with requests.post(f"{url}/generate", json=streamed, stream=True, timeout=PATIENCE) as response:
                lines = filter(None, response.iter_lines())
                assert any(json.loads(line.removeprefix(b"data: "))["output_ids"] for line in lines)
        requests.post(f"{url}/abort_request", json={"rid": "named"}, timeout=PATIENCE).raise_for_status()
        named.result()
        for prompt, answer in zip(prompts[3:], stays, strict=True):
            check(oracle, prompt, answer.result())

    def is_idle():
        load = requests.get(f"{url}/v1/loads", timeout=PATIENCE).json()["loads"][0]
        return load["num_running_reqs"] == load["num_waiting_reqs"] == 0

    assert wait_for(is_idle, PATIENCE)

"""--lazy-fallback: a server that does not support chunk reuse serves without it, and refuses chunks with the reason."""

import pytest
import requests
import torch
from http_prompts import GREEDY, SEGMENTS, call, generate, ids, random_prompt

from sglang_lazy.testing import device_flags, running_server

pytestmark = pytest.mark.slow  # starts a server


@pytest.fixture(scope="module")
def server_log(tmp_path_factory):
    return tmp_path_factory.mktemp("fallback") / "server.log"


@pytest.fixture(scope="module")
def falling_back(tiny_model, server_log):
    """URL of a server without the radix cache, which chunks need. On a CPU it picks its own backends."""
    device = device_flags() if torch.cuda.is_available() else ["--device", "cpu", "--dtype", "float32"]
    flags = ["--model-path", tiny_model, "--max-total-tokens", "8000", "--disable-radix-cache", "--lazy-fallback"]
    with running_server([*flags, *device], server_log) as url:
        yield url


def test_the_log_says_why(falling_back, server_log):
    log = server_log.read_text()
    assert "Serving without chunk reuse: --disable-radix-cache" in log
    assert call(falling_back, "/v1/completions", model="default", prompt="Who?", max_tokens=4)["choices"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the server uses it")
def test_backends_for_a_cpu_are_chosen_and_logged_once(falling_back, server_log):
    chosen = "--attention-backend torch_native --sampling-backend pytorch --grammar-backend llguidance"
    assert server_log.read_text().count(f"on a CPU, these flags were not set and are now {chosen}\n") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_chunks_are_refused(falling_back, stream):
    body = {"segments": SEGMENTS, "sampling_params": GREEDY, "stream": stream}
    response = requests.post(falling_back + "/generate", json=body, timeout=120)
    assert "runs without chunk reuse" in response.text
    assert stream or response.status_code == 400


def test_plain_prompts_and_link_full_are_answered(falling_back):
    segments, input_ids = random_prompt(5)
    plain = generate(falling_back, input_ids=input_ids)
    for prompt in ({"segments": segments, "link": "full"}, {"segments": [ids("text", *input_ids)]}):
        assert generate(falling_back, **prompt)["output_ids"] == plain["output_ids"]

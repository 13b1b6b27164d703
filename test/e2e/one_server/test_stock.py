"""Without chunks, a server with the plugin answers exactly as SGLang without it on the same machine."""

import os
import random

import pytest
import requests

from sglang_lazy.testing import Client, running_server


@pytest.fixture
def stock(server_flags, stock_path, tmp_path):
    """URL of SGLang's own server."""
    path = os.pathsep.join([stock_path, os.environ.get("PYTHONPATH", "")])
    how = dict(module="sglang.launch_server", environment={"PYTHONPATH": path})
    with running_server(server_flags, tmp_path / "stock.log", **how) as url:
        assert "segments" not in requests.get(f"{url}/openapi.json", timeout=60).text, "the server has the plugin"
        yield url


def traffic() -> list[dict]:
    """Plain prompts that share prefixes and recur; a batch, and a prompt of several prefill passes."""
    rng = random.Random(3)

    def ids(n):
        return [rng.randrange(10, 500) for _ in range(n)]

    shared = ids(360)
    prompts = [shared + ids(80), shared + ids(20), shared + ids(80), ids(1200), ids(28)]
    prompts += [prompts[0], [ids(60), shared + ids(36), ids(160)]]
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return [{"input_ids": prompt, "sampling_params": params, "return_logprob": True} for prompt in prompts]


def answers(url: str) -> list:
    """Tokens, logprobs and prefix hits of all the traffic, in order."""
    Client(url).flush_cache()
    results = []
    for body in traffic():
        response = requests.post(f"{url}/generate", json=body, timeout=120)
        assert response.ok, response.text
        answer = response.json()
        for one in answer if isinstance(answer, list) else [answer]:
            meta = one["meta_info"]
            results.append((one["output_ids"], meta["output_token_logprobs"], meta["cached_tokens"]))
    return results


@pytest.mark.slow  # starts a server; plain prompts are also among test_oracle_matrix.py's scenarios
def test_plain_traffic_equals_stock(server, stock):
    """Same tokens, bitwise equal logprobs, same prefix hits."""
    ours, theirs = answers(server), answers(stock)
    assert len(ours) == 9
    for mine, its in zip(ours, theirs, strict=True):
        assert mine == its

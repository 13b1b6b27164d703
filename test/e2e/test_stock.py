"""Without chunks, a server with the plugin answers exactly as stock SGLang on the same machine."""

import os
import random

import pytest
import requests
from serving import device_flags, running_server

FLAGS = ["--max-total-tokens", "4000", "--chunked-prefill-size", "128", "--random-seed", "1", *device_flags()]


@pytest.fixture
def rotary_stand_in(tmp_path, monkeypatch):
    """Off CUDA, stock SGLang imports a vLLM kernel that it never calls."""
    package = tmp_path / "stand-in" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "_custom_ops.py").write_text("rotary_embedding = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))


def traffic() -> list[dict]:
    """Plain prompts that share beginnings and repeat; one batch and one prompt in several prefill passes."""
    rng = random.Random(3)

    def ids(n):
        return [rng.randrange(10, 500) for _ in range(n)]

    shared = ids(90)
    prompts = [shared + ids(20), shared + ids(5), shared + ids(20), ids(300), ids(7)]
    prompts += [prompts[0], [ids(15), shared + ids(9), ids(40)]]
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return [{"input_ids": prompt, "sampling_params": params, "return_logprob": True} for prompt in prompts]


def answers(module: str, model: str, log) -> list:
    """Tokens, logprobs and prefix hits of all traffic, in order."""
    results = []
    with running_server(["--model-path", model, *FLAGS], log, module=module) as url:
        for body in traffic():
            response = requests.post(f"{url}/generate", json=body, timeout=120)
            assert response.ok, response.text
            answer = response.json()
            for one in answer if isinstance(answer, list) else [answer]:
                meta = one["meta_info"]
                results.append((one["output_ids"], meta["output_token_logprobs"], meta["cached_tokens"]))
    return results


def test_plain_traffic_equals_stock(tiny_model, tmp_path, rotary_stand_in):
    """Same tokens, bitwise the same logprobs, the same prefix hits."""
    ours = answers("sglang_lazy.launch_server", tiny_model, tmp_path / "ours.log")
    stock = answers("sglang.launch_server", tiny_model, tmp_path / "stock.log")
    assert len(ours) == 9
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine == theirs

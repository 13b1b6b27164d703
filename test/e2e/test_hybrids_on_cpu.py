"""SGLang itself, without the plugin, serves models with recurrent layers on a CPU, with PyTorch for their kernels: the
ground on which chunks of such models can be tested."""

import os

import pytest
import requests
import torch

from fakes import hybrids_on_cpu
from oracle.hybrids import causal_logprobs, load_hybrid
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from sglang_lazy.testing import CPU_OPTIONS, running_server

pytestmark = pytest.mark.slow  # starts servers

TOLERANCE = 3e-5  # of a log-probability: both compute in fp32, and in another order
NUM_TOKENS = 8
NAMES = [
    name
    for name, spec in HYBRIDS.items()
    if not spec.cpu_options and (spec.core or os.environ.get("LAZY_ALL_MODELS"))  # others lack an image processor
]
FLAGS = [
    "--max-total-tokens",
    "2048",
    "--max-running-requests",
    "4",
    "--context-length",
    "1024",
    "--disable-cuda-graph",
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has")
@pytest.mark.parametrize("name", NAMES)
def test_stock_answers_are_those_of_transformers(name, model_dir, stock_path, with_plugin, tmp_path):
    """Prompts in one batch and a second turn, whose tokens are cached."""
    path, dice = build_model(HYBRIDS[name], model_dir), Dice(name)
    prompts = [list(dice.ids(length)) for length in (100, 133, 40)]
    flags = ["--model-path", path, "--skip-tokenizer-init", "--skip-server-warmup", *FLAGS]
    for option, value in {**CPU_OPTIONS, **hybrids_on_cpu.OPTIONS}.items():
        flags += [f"--{option.replace('_', '-')}", *([] if value is True else [value])]
    with with_plugin(hybrids_on_cpu.load):
        environment = {
            **hybrids_on_cpu.ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join([stock_path, os.environ["PYTHONPATH"]]),
            "SGLANG_PLUGINS": "hybrids_on_cpu",
        }
        how = dict(module="sglang.launch_server", environment=environment, timeout=120)
        with running_server(flags, tmp_path / "server.log", **how) as url:
            answers = ask(url, prompts)
            prompts.append([*prompts[1], *answers[1]["output_ids"], *dice.ids(3)])
            answers += ask(url, prompts[-1:])
    assert answers[-1]["meta_info"]["cached_tokens"] >= 133
    model = load_hybrid(path)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["output_ids"]
        expected = causal_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1]
        reported = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        assert expected.argmax(-1).tolist() == tokens
        assert (expected.amax(-1) - reported).abs().max() <= TOLERANCE


def ask(url: str, prompts: list[list[int]]) -> list[dict]:
    params = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": params, "return_logprob": True}
    response = requests.post(f"{url}/generate", json=body, timeout=60)
    assert response.ok, response.text
    return response.json()

"""SGLang itself, without the plugin, serves models with recurrent layers on a CPU, with PyTorch for their kernels: the
ground on which chunks of such models can be tested."""

import contextlib

import pytest
import requests
import stock
import torch

from fakes import hybrids_on_cpu
from oracle.hybrids import causal_logprobs, load_hybrid
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from sglang_lazy.testing import CPU_OPTIONS, running_server

TOLERANCE = 1e-4  # of a log-probability: both compute in fp32, which alone is off float64 by up to 6e-5 here
NUM_TOKENS = 8
NAMES = [  # others lack an image processor
    name if name == "qwen3.5" else pytest.param(name, marks=pytest.mark.nightly)
    for name, spec in HYBRIDS.items()
    if not spec.cpu_options
]
pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]


@pytest.fixture
def serving(stock_path, with_plugin, tmp_path):
    """`with serving(path, module)`: the URL of a server, SGLang's own by default."""

    @contextlib.contextmanager
    def serving(path, module="sglang.launch_server"):
        flags = stock.flags_of({**CPU_OPTIONS, "model_path": path})
        with with_plugin(hybrids_on_cpu.load):
            environment = dict(hybrids_on_cpu.ENVIRONMENT)
            if module == "sglang.launch_server":
                environment |= stock.without_plugin(stock_path, "hybrids_on_cpu")
            with running_server(
                flags, tmp_path / f"{module}.log", module=module, environment=environment, timeout=120
            ) as url:
                yield url

    return serving


# By day, test_recurrent_chunks.py shows it with the plugin: prompts without chunks are among its scenarios.
@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_stock_answers_are_those_of_transformers(name, model_dir, serving):
    """Prompts in one batch and a second turn, whose tokens are cached; with what SGLang chooses if no flag does."""
    path, dice = build_model(HYBRIDS[name], model_dir), Dice(name)
    prompts = [list(dice.ids(length)) for length in (100, 133, 40)]
    with serving(path) as url:
        chosen = requests.get(f"{url}/server_info", timeout=60).json()
        strategy = "no_buffer" if name.startswith("lfm2") else "extra_buffer"
        assert chosen["mamba_radix_cache_strategy"] == strategy
        assert chosen["disable_overlap_schedule"] == (strategy == "no_buffer")
        answers = ask(url, prompts)
        prompts.append([*prompts[1], *answers[1]["output_ids"], *dice.ids(3)])
        answers += ask(url, prompts[-1:])
    assert answers[-1]["meta_info"]["cached_tokens"] >= 128  # with overlap, states are kept at multiples of 64
    model = load_hybrid(path)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["output_ids"]
        expected = causal_logprobs(model, prompt + tokens)[len(prompt) - 1 : -1]
        reported = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        assert expected.argmax(-1).tolist() == tokens
        assert (expected.amax(-1) - reported).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_answers_without_chunks_are_stocks_to_the_bit(name, model_dir, serving):
    path, dice, reported = build_model(HYBRIDS[name], model_dir), Dice(name), []
    first, second = list(dice.ids(133)), list(dice.ids(40))
    for module in ("sglang.launch_server", "sglang_lazy.launch_server"):
        with serving(path, module) as url:
            (answer,) = ask(url, [first])
            answers = [answer, *ask(url, [second]), *ask(url, [[*first, *answer["output_ids"], 7]])]
        details = [each["meta_info"] for each in answers]
        reported.append([(each["output_token_logprobs"], each["cached_tokens"]) for each in details])
    assert reported[0] == reported[1]


def ask(url, prompts):
    return stock.ask(url, prompts, NUM_TOKENS, return_logprob=True)

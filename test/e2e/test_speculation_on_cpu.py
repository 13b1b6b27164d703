"""SGLang itself, without the plugin, speculates on a CPU, with PyTorch for its kernels: the ground on which speculation
over chunks can be tested."""

import pytest
import torch
from stock import ask, flags_of, without_plugin

from fakes import speculation_on_cpu
from oracle.block_mask import Oracle, greedy
from oracle.models.build import build
from oracle.models.drafts import build_draft
from oracle.scenarios import Dice
from oracle.segments import text
from sglang_lazy.testing import CPU_OPTIONS, running_server

pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

NUM_TOKENS = 24


# By day, test_speculation_oracle.py has all: prompts without chunks are among its scenarios.
@pytest.mark.parametrize(
    "overlap", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["overlap", "synchronous"]
)
@pytest.mark.parametrize(
    "algorithm", ["STANDALONE", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("EAGLE", "EAGLE3"))]
)
def test_stock_answers_are_those_without_drafts(algorithm, overlap, model_dir, stock_path, with_plugin, tmp_path):
    """Prompts in one batch and a second turn, whose tokens are cached."""
    target, dice = build("llama", model_dir), Dice("drafts")
    options = {
        **CPU_OPTIONS,
        **speculation_on_cpu.OPTIONS,
        "model_path": target,
        "speculative_algorithm": algorithm,
        "speculative_draft_model_path": build_draft(algorithm, target, model_dir),
        **({} if overlap else {"disable_overlap_schedule": True}),
    }
    prompts = [list(dice.ids(length)) for length in (100, 133, 40)]
    with with_plugin(speculation_on_cpu.load):
        environment = without_plugin(stock_path, "speculation_on_cpu")
        how = dict(module="sglang.launch_server", environment=environment, timeout=120)
        with running_server(flags_of(options), tmp_path / "server.log", **how) as url:
            answers = ask(url, prompts, NUM_TOKENS)
            prompts.append([*prompts[1], *answers[1]["output_ids"], *dice.ids(3)])
            answers += ask(url, prompts[-1:], NUM_TOKENS)
    assert answers[-1]["meta_info"]["cached_tokens"] >= 133
    oracle = Oracle(target)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer["output_ids"]
        assert len(tokens) == NUM_TOKENS
        assert greedy(oracle.logprobs([text(prompt)], tokens[:-1])) == tokens
    by_length = [answer["meta_info"]["spec_correct_drafts_histogram"] for answer in answers]
    if algorithm == "STANDALONE":
        runs = {length for histogram in by_length for length, count in enumerate(histogram) if count}
        assert runs == {0, 1, 2, 3}, by_length

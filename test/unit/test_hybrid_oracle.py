"""The oracle of models with recurrent layers, against facts that do not come from it."""

import pytest
import torch

from oracle.hybrids import HybridOracle, causal_logprobs
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from oracle.segments import chunk, text, token_ids

TOLERANCE = 3e-6  # relative to the largest log-probability: norms and Mamba's recurrences stay in fp32


@pytest.fixture(scope="module", params=HYBRIDS)
def in_fp64(request, tmp_path_factory):
    oracle = HybridOracle(build_model(HYBRIDS[request.param], tmp_path_factory.mktemp("models")), torch.float64)
    oracle.model.set_experts_implementation("eager")  # the default has no fp64
    return oracle


@pytest.fixture
def oracle(in_fp64, monkeypatch):
    """transformers computes blocks of tokens in fp32, whose rounding depends on the CPU: here, its fp32 is fp64."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    return in_fp64


def off(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def test_text_alone_is_the_models_causal_answer(oracle):
    dice = Dice("text")
    prompt = [text(dice.ids(70)), text(dice.ids(2)), text(dice.ids(30))]
    tokens = list(dice.ids(3))
    assert off(oracle.logprobs(prompt, tokens), causal_logprobs(oracle.model, token_ids(prompt) + tokens)) <= TOLERANCE


def test_a_chunk_at_the_beginning_changes_nothing(oracle):
    """It sees nothing before it anyway; text sees its convolution inputs and its state."""
    dice = Dice("leading")
    prompt = [chunk(dice.ids(90)), text(dice.ids(20))]
    assert off(oracle.logprobs(prompt), causal_logprobs(oracle.model, token_ids(prompt))) <= TOLERANCE


def test_chunks_are_computed_alone(oracle):
    """And text after them is that of no causal prompt: it depends on their order, and on what is before them."""
    dice = Dice("alone")
    first, second, before, question = chunk(dice.ids(40)), chunk(dice.ids(2)), text(dice.ids(9)), text(dice.ids(12))
    prompt = [before, first, second, question]
    answer = oracle.logprobs(prompt)
    assert off(answer[9:49], causal_logprobs(oracle.model, list(first.ids))) <= TOLERANCE
    assert off(answer[49:51], causal_logprobs(oracle.model, list(second.ids))) <= TOLERANCE
    for other in ([text(token_ids(prompt))], [before, second, first, question], [first, second, question]):
        compared = causal_logprobs(oracle.model, token_ids(other)) if len(other) == 1 else oracle.logprobs(other)
        assert off(answer[-1], compared[-1]) > 100 * TOLERANCE


def test_chunks_are_computed_after_a_preamble(oracle):
    """As behind it in a causal prompt; text before them does not change, and text behind them does."""
    dice = Dice("preamble")
    preamble, document = list(dice.ids(11)), chunk(dice.ids(40))
    prompt = [text(dice.ids(9)), document, text(dice.ids(12))]
    answer, alone = oracle.logprobs(prompt, preamble=preamble), oracle.logprobs(prompt)
    causal = causal_logprobs(oracle.model, [*preamble, *document.ids])
    assert off(answer[9:49], causal[11:]) <= TOLERANCE
    assert off(answer[:9], alone[:9]) <= TOLERANCE
    assert off(answer[-1], alone[-1]) > 100 * TOLERANCE


def test_a_prompt_that_ends_in_a_chunk_is_refused(oracle):
    with pytest.raises(ValueError, match="ends in text"):
        oracle.logprobs([text([9, 10]), chunk([11, 12])])

"""--lazy-untested-model: models that pass the start-up check are served, with a warning; no others are."""

import dataclasses

import pytest
from http_prompts import generate

from oracle.block_mask import Oracle, greedy
from oracle.models import MODELS
from oracle.models.build import build
from oracle.scenarios import build_scenario
from sglang_lazy.testing import ServerError, device_flags, running_server

pytestmark = pytest.mark.slow  # starts servers


@pytest.fixture
def path(model_dir, monkeypatch):
    """path(config_class, architecture, **settings): build a model like the tiny Llama; returns its path."""

    def path(config_class, architecture, **settings):
        spec = MODELS["llama"]
        changes = dict(config_class=config_class, architecture=architecture, settings={**spec.settings, **settings})
        monkeypatch.setitem(MODELS, "untested", dataclasses.replace(spec, name="untested", **changes))
        return build("untested", model_dir)

    return path


@pytest.fixture
def unknown(path):
    """A model class of SGLang's that accepts a Llama's configuration and weights, and that no other test serves."""
    return path("LlamaConfig", "IQuestCoderForCausalLM")


def flags(model, *more):
    return ["--model-path", model, "--max-total-tokens", "4000", *device_flags(), *more]


def refusal(model, log, *more):
    with pytest.raises(ServerError), running_server(flags(model, *more), log):
        raise AssertionError("it was served")
    return log.read_text()


def test_it_is_refused_without_the_flag(unknown, tmp_path):
    shown = refusal(unknown, tmp_path / "log")
    assert "architecture IQuestCoderForCausalLM: not among those tested" in shown and "--lazy-untested-model" in shown


def test_it_is_served_with_the_flag(unknown, tmp_path):
    """And its answers are right."""
    prompt = build_scenario("retrieval")[0].segments
    with running_server(flags(unknown, "--lazy-untested-model"), tmp_path / "log") as url:
        for _ in range(2):
            answer = generate(url, segments=[segment.to_request() for segment in prompt])
    assert all(chunk["hit"] for chunk in answer["meta_info"]["chunks"])
    tokens = answer["output_ids"]
    assert greedy(Oracle(unknown).logprobs(prompt, tokens[:-1])) == tokens
    assert "IQuestCoderForCausalLM passed the start-up check, but no test" in (tmp_path / "log").read_text()


def test_the_flag_overrides_no_other_reason(path, tmp_path):
    """Hunyuan's dense models have norms after the rotation."""
    shown = refusal(path("HunYuanDenseV1Config", None, use_qk_norm=True), tmp_path / "log", "--lazy-untested-model")
    assert "HunYuanAttention of layer 0: rotating a query or key back" in shown

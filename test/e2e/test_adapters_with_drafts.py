"""Speculation under LoRA adapters, which change the model and not what drafts for it: answers of two adapters and of
the model itself, in one batch, are the oracle's, which has an adapter's weights merged into the model's."""

import gc

import pytest
import torch
from test_oracle_matrix import GROUPS, Served, reuse
from test_speculation_oracle import Speculating

from fakes import draft_kv_watch, ngram_on_cpu, speculation_on_cpu
from oracle.adapters import merged, random_adapter
from oracle.block_mask import Oracle
from oracle.models.build import build
from oracle.models.drafts import build_draft
from oracle.scenarios import Dice
from oracle.segments import text
from sglang_lazy.testing import CPU_OPTIONS

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]

ADAPTERS = {"a": {"seed": 1, "rank": 4}, "b": {"seed": 2, "rank": 8, "modules": ("q_proj", "v_proj")}}
NAMES = [None, *ADAPTERS]


class Adapted(Speculating):
    """A model, its draft and adapters, of which each answers all prompts."""

    def __init__(self, algorithm, folder, work):
        self.histograms = []
        target = build("llama", folder)
        paths = {name: random_adapter(target, work / name, **options) for name, options in ADAPTERS.items()}
        models = {name: str(merged(target, path, work / f"merged {name}")) for name, path in paths.items()}
        self.oracles = {name: Oracle(model) for name, model in {None: target, **models}.items()}
        drafting = ngram_on_cpu.OPTIONS
        if algorithm != "NGRAM":
            draft = build_draft(algorithm, target, folder)
            drafting = {"speculative_algorithm": algorithm, "speculative_draft_model_path": draft}
            drafting |= speculation_on_cpu.OPTIONS
        Served.__init__(
            self,
            "llama",
            folder,
            **CPU_OPTIONS,
            **drafting,
            lora_paths=[f"{name}={path}" for name, path in paths.items()],
            max_loras_per_batch=len(NAMES),
            lora_backend="torch_native",
            max_total_tokens=6144,
            chunked_prefill_size=64,
        )

    def answer(self, *prompts):
        """The same of all adapters in one batch; returns the outputs of the model itself."""
        asked = [(name, prompt) for name in NAMES for prompt in prompts]
        outputs = self.engine.generate(
            segments=[[segment.to_request() for segment in prompt] for _, prompt in asked],
            lora_path=[name for name, _ in asked],
            sampling_params={"temperature": 0, "max_new_tokens": self.num_tokens, "ignore_eos": True},
            return_logprob=True,
        )
        for (name, prompt), output in zip(asked, outputs, strict=True):
            assert len(output["output_ids"]) == self.num_tokens
            self.compare(self.oracles[name].logprobs(prompt, output["output_ids"][:-1]), output)
            self.histograms.append(output["meta_info"]["spec_correct_drafts_histogram"])
        return outputs[: len(prompts)]


PLUGINS = {"EAGLE": draft_kv_watch, "EAGLE3": draft_kv_watch, "NGRAM": ngram_on_cpu}


def on_one_worker(algorithm):
    marks = [] if algorithm == "EAGLE" else [pytest.mark.nightly]
    return pytest.param(algorithm, marks=[pytest.mark.xdist_group(f"adapters {algorithm}"), *marks])


@pytest.fixture(scope="module", params=map(on_one_worker, PLUGINS))
def served(request, model_dir, with_plugin, tmp_path_factory):
    with with_plugin(PLUGINS[request.param].load):
        served = Adapted(request.param, model_dir, tmp_path_factory.mktemp("adapters"))
    yield served
    served.engine.shutdown()
    gc.collect()


def test_scenarios(served):
    """Cold, warm, reordered, second turns, beside prompts without chunks; nothing is held afterwards."""
    assert any(hit for _, hit in reuse(served.play(GROUPS[0])))
    served.flush()


def test_each_adapter_has_its_own_chunks(served):
    """Of which prompts of another find nothing, and turns of its own all."""
    dice = Dice("adapters")
    prompt = [dice.text(6), dice.chunk(40), dice.chunk(25), dice.text(5)]
    params = {"temperature": 0, "max_new_tokens": served.num_tokens, "ignore_eos": True}

    def ask(prompt, name):
        given = [segment.to_request() for segment in prompt]
        output = served.engine.generate(segments=given, lora_path=name, sampling_params=params)
        return output["output_ids"], [chunk["hit"] for chunk in output["meta_info"]["chunks"]]

    answers = {}
    for name in NAMES:
        answers[name], hits = ask(prompt, name)
        assert hits == [False, False]
        turn = [*prompt, text(answers[name]), dice.text(4)]
        assert ask(turn, name)[1] == [True, True]
    assert len({tuple(answer) for answer in answers.values()}) == len(NAMES)
    for _ in range(2):
        served.answer(prompt)
    assert max(served.accepted()) >= 3
    served.flush()

"""Models that draft with a layer of their own: answers over chunks are the oracle's, and runs of every length are
accepted, since drafts are what has followed their last token before."""

import gc

import pytest
import test_recurrent_chunks
import torch
from served import TWO_RANKS
from test_oracle_matrix import GROUPS, reuse
from test_recurrent_chunks import hits
from test_speculation_oracle import Speculating

from fakes import hybrids_on_cpu, remembered_drafts, speculation_on_cpu
from oracle.models.build import build_model
from oracle.models.drafts import build_draft
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import SCENARIOS, Dice
from oracle.segments import text, token_ids

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]


WAYS = {
    "": {},
    "with overlap": {"mamba_radix_cache_strategy": "auto", "disable_overlap_schedule": False},
    "on two ranks": {"tp_size": 2},
}
"""Options of servers, by what their names end in; "with overlap" is what SGLang chooses if no flag does."""


def on_one_worker(name, *marks):
    return pytest.param(name, marks=[pytest.mark.xdist_group(f"own drafts {name}"), *marks])


@pytest.fixture(scope="module", params=map(on_one_worker, ["glm"]))
def glm(model_dir, with_plugin):
    with with_plugin(remembered_drafts.load):
        served = Speculating("NEXTN", "glm4-moe", model_dir, chunked_prefill_size=64)
    yield served
    served.engine.shutdown()
    gc.collect()


def test_scenarios_of_glm(glm):
    """Cold, warm, reordered, second turns, beside prompts without chunks; twice, and nothing is held afterwards."""
    for names in [*GROUPS, *GROUPS]:
        assert any(hit for _, hit in reuse(glm.play(names)))
    glm.flush()
    assert glm.accepted() == {0, 1, 2, 3}


class SpeculatingHybrid(test_recurrent_chunks.Served):
    """A Qwen3.5, whose recurrent layers keep a state at each draft until it is accepted or refused."""

    num_tokens, tolerance = 14, 1e-4  # of long answers

    def __init__(self, name, folder, **options):
        self.histograms, self.keeps_ends = [], options.get("disable_overlap_schedule", True)
        draft = build_draft("NEXTN", build_model(HYBRIDS[name], folder), folder)
        options = {
            "model_path": draft,
            "speculative_algorithm": "NEXTN",
            **hybrids_on_cpu.WITHOUT_OVERLAP,
            "mamba_track_interval": 64,  # how often SGLang keeps a state in decode: short answers come to it
            **speculation_on_cpu.OPTIONS,
            **options,
        }
        super().__init__(name, folder, **options)

    def answer(self, *prompts):
        outputs = super().answer(*prompts)
        self.histograms += [output["meta_info"]["spec_correct_drafts_histogram"] for output in outputs]
        return outputs

    def accepted(self) -> set[int]:
        """The lengths of accepted runs so far."""
        return {length for counts in self.histograms for length, count in enumerate(counts) if count}


@pytest.fixture(scope="module")
def qwen(request, model_dir, with_plugin):
    with (
        with_plugin(hybrids_on_cpu.load),
        with_plugin(remembered_drafts.load),
        pytest.MonkeyPatch.context() as environment,
    ):
        name, _, way = request.param.partition(" ")
        for variable, value in (hybrids_on_cpu.ENVIRONMENT | (TWO_RANKS if way == "on two ranks" else {})).items():
            environment.setenv(variable, value)
        served = SpeculatingHybrid(name, model_dir, chunked_prefill_size=64, **WAYS[way])
    yield served
    served.engine.flush_cache()  # an idle server checks its accounting
    served.engine.shutdown()
    gc.collect()


@pytest.mark.parametrize(
    "qwen",
    [
        on_one_worker("qwen3.5", pytest.mark.nightly),
        on_one_worker("qwen3.5 with overlap"),
        on_one_worker("qwen3.5-vl-moe", pytest.mark.nightly),
        on_one_worker("qwen3.5 on two ranks", pytest.mark.nightly),
    ],
    indirect=True,
)
def test_scenarios_of_qwen(qwen):
    for _ in range(2):
        qwen.play(list(SCENARIOS))
    qwen.engine.flush_cache()
    assert qwen.accepted() == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "qwen",
    [
        on_one_worker("qwen3.5", pytest.mark.nightly),
        *map(on_one_worker, ["qwen3.5 with overlap", "qwen3.5-vl-moe"]),
    ],
    indirect=True,
)
def test_second_turns_of_qwen(qwen):
    """The state after an answer is that after its last accepted token. An answer that ends within a run has none, and
    with overlap none has; then its text is computed again."""
    dice = Dice("turns of drafts")
    start, a, b, question = dice.text(9), dice.chunk(40), dice.chunk(30), dice.text(7)
    known = []
    prompt = [start, a, b, question]
    for num_tokens in range(5, 13):
        qwen.num_tokens = 16
        qwen.answer(prompt)  # to be remembered
        qwen.num_tokens = num_tokens
        (output,) = qwen.answer(prompt)
        turn = [*prompt, text(output["output_ids"]), dice.text(4)]
        (output,) = qwen.answer(turn)
        assert hits(output) == [True, True]
        known.append(output["meta_info"]["cached_tokens"] >= len(token_ids(prompt)) + num_tokens - 1)
    qwen.engine.flush_cache()
    assert not all(known) and any(known) == qwen.keeps_ends

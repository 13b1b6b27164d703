"""Drafts from earlier answers, over chunks on a CPU: batches with chunks verify chains, others SGLang's own trees."""

import gc

import pytest
import torch
from test_oracle_matrix import GROUPS, Served, reuse
from test_speculation_oracle import Speculating

from fakes import ngram_on_cpu
from oracle.scenarios import Dice
from sglang_lazy.testing import CPU_OPTIONS

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]


class Repeating(Speculating):
    def __init__(self, folder, **options):
        self.histograms = []
        Served.__init__(self, "llama", folder, **CPU_OPTIONS, **ngram_on_cpu.OPTIONS, **options)


@pytest.fixture(scope="module", params=[pytest.param("ngram", marks=pytest.mark.xdist_group("ngram"))])
def served(request, model_dir, with_plugin):
    with with_plugin(ngram_on_cpu.load):
        served = Repeating(model_dir, chunked_prefill_size=64)
    yield served
    served.engine.shutdown()
    gc.collect()


def test_scenarios(served):
    """Twice, so that answers repeat earlier ones."""
    for names in [*GROUPS, *GROUPS]:
        assert any(hit for _, hit in reuse(served.play(names)))
    served.flush()
    assert served.accepted() >= {0, 1, 2, 3, 4, 5}


def test_linked_and_plain_batches_in_turn(served):
    """What one kind of batch has drafted, another one drafts as well."""
    dice = Dice("ngram")
    linked, plain = [dice.text(5), dice.chunk(40), dice.chunk(30), dice.text(7)], [dice.text(50)]
    for prompts in ([linked], [plain], [linked, plain], [plain], [linked]):
        served.answer(*prompts)
    served.histograms.clear()
    for prompt in (linked, plain):
        served.answer(prompt)
    assert all(sum(histogram[1:]) for histogram in served.histograms)

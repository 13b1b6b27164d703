"""Models that draft with a layer of their own: answers over chunks are the oracle's, and runs of every length are
accepted, since drafts are what has followed their last token before."""

import gc

import pytest
import torch
from test_oracle_matrix import GROUPS, reuse
from test_speculation_oracle import Speculating

from fakes import remembered_drafts

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]


def on_one_worker(name):
    return pytest.param(name, marks=pytest.mark.xdist_group(f"own drafts {name}"))


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

"""Models with recurrent layers that draft, with chunks in host memory and in storage: the KV that the draft has of a
chunk comes back with the chunk's and with its states."""

import gc

import pytest
import torch
from test_own_drafts import SpeculatingHybrid
from test_recurrent_chunks import hits

from fakes import hybrids_on_cpu, noted_drafts, streams
from oracle.models.build import build, build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import SCENARIOS, Dice

pytestmark = [
    pytest.mark.slow,  # starts engines
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
]
POOL = 1024
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 8.0, "hicache_storage_backend": "file"}


# By day, test_speculation_oracle.py has STANDALONE over the host tier.
@pytest.mark.parametrize("algorithm", ["NEXTN", pytest.param("STANDALONE", marks=pytest.mark.nightly)])
def test_chunks_from_the_host_and_from_storage(algorithm, model_dir, with_plugin, tmp_path, monkeypatch):
    """The draft guesses the same as over chunks that have just been computed. Copies are as late as a GPU allows."""
    drafts, name = tmp_path / "drafts", "qwen3.5"
    monkeypatch.setenv(noted_drafts.PATH_VARIABLE, str(drafts))
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "stored"))
    for variable, value in hybrids_on_cpu.ENVIRONMENT.items():
        monkeypatch.setenv(variable, value)
    options = {**TIERS, "max_total_tokens": POOL}
    if algorithm == "STANDALONE":  # a model without recurrent layers
        options |= {"model_path": build_model(HYBRIDS[name], model_dir), "speculative_algorithm": algorithm}
        options["speculative_draft_model_path"] = build("llama", model_dir)
    with with_plugin(hybrids_on_cpu.load), with_plugin(noted_drafts.load), with_plugin(streams.load):
        served = SpeculatingHybrid(name, model_dir, **options)
    try:
        dice, noted = Dice("from the host"), []
        prompts = [[dice.text(6), *(dice.chunk(length) for length in (40, 25, 60)), dice.text(9)] for _ in range(2)]
        for tier in (None, "host", "storage"):
            for prompt in prompts:
                drafts.unlink(missing_ok=True)
                (output,) = served.answer(prompt)
                noted.append(drafts.read_text().splitlines()[0])  # later ones depend on what was accepted
                assert hits(output) == [tier is not None] * 3
                assert tier is None or output["meta_info"]["cached_tokens_details"][tier] == 125
            if tier == "host":
                served.engine.flush_cache()
            else:
                served.answer(*([dice.text(POOL // 4 - 20)] for _ in range(4)))  # no room for them beside the chunks
        assert noted == noted[:2] * 3 and noted[0] != noted[1]
        if algorithm == "STANDALONE":  # of NEXTN others see this
            served.play(list(SCENARIOS)[::3])
            served.engine.flush_cache()
        assert served.accepted() == {0, 1, 2, 3}
    finally:
        served.engine.shutdown()
        gc.collect()

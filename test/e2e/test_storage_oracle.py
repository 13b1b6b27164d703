"""Servers one after the other over one storage folder, against the oracle."""

import gc

import pytest
from test_oracle_matrix import SERVER, Served, hits

from oracle.models.build import build
from oracle.scenarios import build_scenario
from sglang_lazy import Engine
from sglang_lazy.precompute import precompute

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tiers")]
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_storage_backend": "file"}


def test_a_new_server_answers_over_stored_chunks(model_dir, tmp_path, monkeypatch):
    """A corpus is computed into a folder. Another server computes only what is damaged there, until that is deleted."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    prompt = build_scenario("retrieval")[0].segments
    chunks = [segment for segment in prompt if segment.kind == "chunk"]
    corpus = [segment.to_request() for segment in chunks]

    offline = Engine(model_path=build("llama", model_dir), **{**SERVER, **TIERS})
    assert precompute(offline, corpus) == 0
    assert len(list(tmp_path.glob("*.bin"))) == len(chunks)
    assert precompute(offline, corpus) == len(chunks)
    offline.shutdown()

    served = Served("llama", model_dir, **TIERS)
    (output,) = served.answer(prompt)
    assert hits(output) == [True] * len(chunks)
    assert output["meta_info"]["cached_tokens_details"]["storage"] == sum(len(segment.ids) for segment in chunks)
    damaged = sorted(tmp_path.glob("*.bin"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])

    def num_computed():
        served.flush()
        (output,) = served.answer(prompt)
        return hits(output).count(False)

    assert [num_computed(), num_computed()] == [1, 1]
    damaged.unlink()
    assert [num_computed(), num_computed()] == [1, 0]
    served.engine.shutdown()
    gc.collect()

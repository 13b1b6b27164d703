"""Servers one after the other over one storage directory, against the oracle."""

import gc

import pytest
from test_oracle_matrix import Served, chunk_tokens_reused, hits

from oracle.scenarios import build_scenario
from oracle.segments import chunk

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("tiers")]
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_storage_backend": "file"}


def test_the_next_server_answers_its_first_request_with_hits(model_dir, tmp_path, monkeypatch):
    """Also from a directory where one object is damaged and that cannot be written: these chunks are computed."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    prompt = build_scenario("retrieval")[0].segments
    chunks = [segment for segment in prompt if segment.kind == "chunk"]
    for server in ("stores", "finds"):
        served = Served("llama", model_dir, **TIERS)
        (output,) = served.answer(prompt)
        stored = chunk_tokens_reused(output) if server == "finds" else 0
        assert hits(output) == [server == "finds"] * len(chunks)
        assert (output["meta_info"]["cached_tokens_details"] or {}).get("storage", 0) == stored
        if server == "stores":
            served.flush()  # waits until all is stored
            assert len(list(tmp_path.glob("*.bin"))) == len(chunks)
            served.engine.shutdown()
    assert stored == sum(len(segment.ids) for segment in chunks)
    damaged = sorted(tmp_path.glob("*.bin"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    served.flush()
    (output,) = served.answer([*prompt[:-1], chunk(prompt[-1].ids), prompt[-1]])
    assert sorted(hits(output)) == [False, False] + [True] * (len(chunks) - 1)
    served.engine.shutdown()
    gc.collect()

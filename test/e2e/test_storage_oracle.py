"""Servers one after the other over one storage folder, against the oracle."""

import gc
import json

import pytest
from test_oracle_matrix import Served, hits

from oracle.models.build import build
from oracle.scenarios import build_scenario
from sglang_lazy.testing import device_flags
from sglang_lazy.testing.processes import start

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("waiting")]
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_storage_backend": "file"}


def test_a_new_server_answers_over_stored_chunks(model_dir, tmp_path, monkeypatch):
    """A corpus is computed into a folder. A server computes only what is damaged there, until that is deleted."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    prompt = build_scenario("retrieval")[0].segments
    chunks = [segment for segment in prompt if segment.kind == "chunk"]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"input_ids": segment.ids}) + "\n" for segment in chunks))
    command = ["--model-path", build("llama", model_dir), "--chunks", str(corpus), "--", *device_flags()]
    command += ["--max-total-tokens", "2048", "--hicache-ratio", "4", "--hicache-storage-backend", "file"]
    for num_found in (0, len(chunks)):
        with open(tmp_path / "precompute.log", "w+") as output:
            precompute = start("sglang_lazy.precompute", command, environment={}, source=None, output=output)
            status = precompute.wait()
            output.seek(0)
            shown = output.read()
        assert status == 0 and f"{len(chunks)} chunks are stored; {num_found} of them had been before." in shown, shown
        assert len(list(tmp_path.glob("*.bin"))) == len(chunks)

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

"""Chunks of models with recurrent layers in storage, with what they do to states: servers one after the other over one
folder, on a CPU with PyTorch for their kernels, against the oracle."""

import json

import pytest
import torch
from served import TWO_RANKS
from test_recurrent_chunks import OPTIONS, WAYS, hits, serving

from fakes import hybrids_on_cpu
from oracle.models.build import build_model
from oracle.models.hybrids import HYBRIDS
from oracle.scenarios import Dice
from sglang_lazy.testing import device_flags
from sglang_lazy.testing.processes import start

pytestmark = [
    pytest.mark.slow,  # starts servers
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces kernels that a GPU has"),
    pytest.mark.xdist_group("waiting"),
]
TIERS = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0, "hicache_storage_backend": "file"}


WITH_COMMANDS = [way for way in WAYS if not HYBRIDS[way.partition(" ")[0]].cpu_options]
"""Others need an option that is no flag."""


@pytest.mark.parametrize(
    "way", [way if way == "qwen3.5" else pytest.param(way, marks=pytest.mark.nightly) for way in WITH_COMMANDS]
)
def test_a_new_server_answers_over_stored_states(way, model_dir, with_plugin, tmp_path, monkeypatch):
    """A corpus is computed into a folder. A server computes only what is damaged there."""
    name, options = way.partition(" ")[0], {**WAYS[way], **TIERS}
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    dice = Dice("stored")
    a, b, c = dice.chunks(3, 20, 60)
    start_text, between, question = dice.text(9), dice.text(5), dice.text(12)
    precompute(name, model_dir, with_plugin, tmp_path, [a, b, c], options)
    files = sorted(tmp_path.glob("*.bin"))
    assert len(files) == 6 * options.get("tp_size", 1), "KV and a state of each, of each rank"

    with serving(name, model_dir, with_plugin, **options) as served:

        def computed(*prompt):
            """Whether each chunk was, by a server that has nothing."""
            served.engine.flush_cache()
            (output,) = served.answer([*prompt])
            in_chunks = [segment for segment in prompt if segment.kind == "chunk"]
            found = {s.ids: len(s.ids) for s, hit in zip(in_chunks, hits(output), strict=True) if hit}
            assert output["meta_info"]["cached_tokens_details"]["storage"] == sum(found.values())
            return [not hit for hit in hits(output)]

        assert computed(start_text, a, between, b, question) == [False, False]
        assert computed(c, b, a, question) == [False] * 3
        assert sorted(tmp_path.glob("*.bin")) == files, "nothing is stored again"
        for damaged in files[: len(files) // 3]:  # the KV and the state of one chunk
            whole = damaged.read_bytes()
            damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            assert sorted(computed(start_text, c, b, a, question)) == [False, False, True]
            damaged.write_bytes(whole)
        assert computed(start_text, c, b, a, question) == [False] * 3


def precompute(name, model_dir, with_plugin, tmp_path, chunks, options):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"input_ids": segment.ids}) + "\n" for segment in chunks))
    options = {"max_total_tokens": OPTIONS["max_total_tokens"], **options}
    options |= {"context_length": OPTIONS["context_length"], "disable_cuda_graph": True}
    environment = {**hybrids_on_cpu.ENVIRONMENT, **(TWO_RANKS if options.get("tp_size") == 2 else {})}
    flags = [*device_flags()]
    for option, value in options.items():
        flags += [f"--{option.replace('_', '-')}", *([] if value is True else [str(value)])]
    command = ["--model-path", build_model(HYBRIDS[name], model_dir), "--chunks", str(corpus), "--", *flags]
    with open(tmp_path / "precompute.log", "w+") as output, with_plugin(hybrids_on_cpu.load):
        process = start("sglang_lazy.precompute", command, environment=environment, source=None, output=output)
        status = process.wait()
        output.seek(0)
        shown = output.read()
    assert status == 0 and f"{len(chunks)} chunks are stored; 0 of them had been before." in shown, shown

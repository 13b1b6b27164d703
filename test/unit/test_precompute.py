"""The offline stage without a model: what it reads, how it stores, and what it says."""

import asyncio
import json
import types

import pytest

from sglang_lazy import precompute


class Engine:
    """Stores chunks when it is flushed.  stores: whether that succeeds."""

    def __init__(self, stores=True):
        self.stored, self.computed, self.stores = set(), [], stores
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), self

    def generate(self, segments, sampling_params):
        texts = [chunk["text"] for chunk, _ in segments]
        self.computed.append([text for text in texts if text not in self.stored])
        return [{"meta_info": {"chunks": [{"hit": text in self.stored}]}} for text in texts]

    async def flush_cache(self, timeout_s):
        self.stored.update(self.computed[-1])
        return types.SimpleNamespace(success=self.stores)


def chunks(count):
    return [{"type": "chunk", "text": f"chunk {i}"} for i in range(count)]


def test_all_chunks_are_stored_batch_by_batch(monkeypatch):
    monkeypatch.setattr(precompute, "BATCH_SIZE", 3)
    engine = Engine()
    assert precompute.precompute(engine, chunks(7)) == 0
    assert [len(batch) for batch in engine.computed] == [3, 3, 1]
    assert engine.stored == {f"chunk {i}" for i in range(7)}


def test_an_interrupted_run_goes_on():
    engine = Engine()
    precompute.precompute(engine, chunks(4))
    assert precompute.precompute(engine, chunks(6)) == 4
    assert engine.computed[-1] == ["chunk 4", "chunk 5"]


def test_storage_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="did not store"):
        precompute.precompute(Engine(stores=False), chunks(1))


def test_chunks_file(tmp_path):
    path = tmp_path / "chunks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"text": "a"}, {"input_ids": [1, 2]})))
    assert list(precompute.read_chunks(path)) == [
        {"type": "chunk", "text": "a"},
        {"type": "chunk", "input_ids": [1, 2]},
    ]
    for bad in ({}, {"text": "a", "input_ids": [1]}, {"title": "a"}):
        path.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match="line 1: expected either text or input_ids"):
            list(precompute.read_chunks(path))


def test_flags(capsys):
    args, flags = precompute.parse_args(
        ["--model-path", "m", "--chunks", "c", "--", "--hicache-storage-backend", "file", "--tp", "2"]
    )
    assert args.model_path == "m"
    assert flags == ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--tp", "2"]
    with pytest.raises(SystemExit):
        precompute.parse_args(["--model-path", "m", "--chunks", "c"])
    assert "--hicache-storage-backend is missing" in capsys.readouterr().err

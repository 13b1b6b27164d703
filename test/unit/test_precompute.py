"""Offline precomputation without a model: what it reads, how it stores chunks, and what it reports."""

import asyncio
import json
import types

import pytest

from sglang_lazy import precompute
from sglang_lazy.core.config import ENV_VAR, LazyConfig


class Engine:
    """Stores its chunks when flushed.

    stores: whether that succeeds.  at_once: how many it can store per flush.  refused: what storage never accepts.
    """

    def __init__(self, stores=True, at_once=100, refused=()):
        self.stored, self.computed, self.stores = set(), [], stores
        self.at_once, self.refused, self.num_stored = at_once, refused, 0
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), self

    def generate(self, segments, sampling_params, lora_path=None, link=None):
        texts = [chunk["text"] for chunk, _ in segments]
        self.link = link or LazyConfig.current().default_link
        self.computed.append([text for text in texts if text not in self.stored])
        return [{"meta_info": {"chunks": [{"hit": text in self.stored}]}} for text in texts]

    async def flush_cache(self, timeout_s):
        new = set([text for text in self.computed[-1] if text not in self.refused][: self.at_once])
        self.stored |= new
        self.num_stored += len(new)
        return types.SimpleNamespace(success=self.stores)

    def get_server_info(self):
        return {"internal_states": [{"lazy_storage": {"stored": self.num_stored}}]}


def chunks(count):
    return [{"type": "chunk", "text": f"chunk {i}"} for i in range(count)]


def test_all_chunks_are_stored_batch_by_batch(monkeypatch):
    monkeypatch.setattr(precompute, "BATCH_SIZE", 3)
    engine = Engine()
    assert precompute.precompute(engine, chunks(7)) == 0
    assert [len(batch) for batch in engine.computed] == [3, 3, 1]
    assert engine.stored == {f"chunk {i}" for i in range(7)}


def test_an_interrupted_run_resumes():
    engine = Engine()
    precompute.precompute(engine, chunks(4))
    assert precompute.precompute(engine, chunks(6)) == 4
    assert engine.computed[-1] == ["chunk 4", "chunk 5"]


def test_storage_that_fails_is_an_error():
    with pytest.raises(RuntimeError, match="did not store"):
        precompute.precompute(Engine(stores=False), chunks(1))
    with pytest.raises(RuntimeError, match="does not take this chunk: .*chunk 3"):
        precompute.precompute(Engine(refused=["chunk 3"]), chunks(5))


@pytest.mark.parametrize(
    "default, link",
    [
        ("block", "block"),
        ("epic:tokens=16", "block"),
        ("base+query:ratio=0.2", "base"),
        ("full", "block"),
        ("packet", "packet"),
    ],
)
def test_whole_chunks_are_computed(monkeypatch, default, link):
    """As the default policy wants them: behind a preamble, or among trained tokens. What it would compute in context,
    such as all of a short chunk, is none of their KV."""
    monkeypatch.setenv(ENV_VAR, json.dumps({"default_link": default}))
    engine = Engine()
    precompute.precompute(engine, chunks(1))
    assert engine.link == link


def test_a_batch_too_large_for_the_host_is_stored_one_by_one():
    engine = Engine(at_once=2)
    assert precompute.precompute(engine, chunks(5)) == 0
    assert engine.stored == {f"chunk {i}" for i in range(5)}


def test_a_duplicate_in_a_batch_is_stored_once():
    engine = Engine()
    assert precompute.precompute(engine, chunks(3) * 2) == 0
    assert engine.stored == {f"chunk {i}" for i in range(3)} and len(engine.computed) == 1


def test_a_corpus_is_read_while_it_is_computed(monkeypatch):
    monkeypatch.setattr(precompute, "BATCH_SIZE", 3)
    engine, read = Engine(), []

    def corpus():
        for i, chunk in enumerate(chunks(7)):
            assert i <= len(engine.stored) + 3
            read.append(i)
            yield chunk

    precompute.precompute(engine, corpus())
    assert len(read) == 7


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

"""Offline precomputation without a model: what it reads, how it stores chunks, and what it reports."""

import asyncio
import json
import types

import pytest

from sglang_lazy import precompute
from sglang_lazy.core.config import ENV_VAR, LazyConfig


class Engine:
    """Stores a chunk each time it is asked how many it has stored, and the rest when flushed.

    stores: whether that succeeds.  room: how many chunks it can hold until they are stored; it forgets others.
    refused: what storage never accepts.
    """

    def __init__(self, stores=True, room=100, refused=()):
        self.stored, self.resident, self.unstored, self.computed = [], set(), [], []
        self.stores, self.room, self.refused = stores, room, refused
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), self

    def generate(self, segments, sampling_params, lora_path=None, link=None):
        texts = [chunk["text"] for chunk, _ in segments]
        self.link = link or LazyConfig.current().default_link
        hits = [text in self.stored or text in self.resident for text in texts]
        new = list(dict.fromkeys(text for text, hit in zip(texts, hits, strict=True) if not hit))
        self.computed.append(new)
        self.resident |= set(new)
        self.unstored += [text for text in new if text not in self.refused][: self.room - len(self.unstored)]
        return [{"meta_info": {"chunks": [{"hit": hit}]}} for hit in hits]

    async def flush_cache(self, timeout_s):
        self.stored += self.unstored
        self.unstored, self.resident = [], set()
        return types.SimpleNamespace(success=self.stores)

    def get_server_info(self):
        self.stored += self.unstored[:1]
        del self.unstored[:1]
        return {"internal_states": [{"lazy_storage": {"stored": len(self.stored)}}]}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(precompute, "BATCH_SIZE", 3)
    monkeypatch.setattr(precompute, "ROUND_SIZE", 6)
    monkeypatch.setattr(precompute, "PATIENCE", 0.1)


def chunks(count):
    return [{"type": "chunk", "text": f"chunk {i}"} for i in range(count)]


def texts(count):
    return {f"chunk {i}" for i in range(count)}


def test_all_chunks_are_stored_batch_by_batch():
    engine = Engine()
    assert precompute.precompute(engine, chunks(8)) == 0
    assert [len(batch) for batch in engine.computed] == [3, 3, 2]
    assert set(engine.stored) == texts(8)


def test_a_batch_is_stored_while_the_next_is_computed(monkeypatch):
    """But no more than one, since the host holds what is not stored yet."""
    engine, waiting = Engine(), []
    generate = engine.generate

    def watched(segments, *args, **kwargs):
        waiting.append(len(engine.unstored))
        return generate(segments, *args, **kwargs)

    monkeypatch.setattr(engine, "generate", watched)
    monkeypatch.setattr(precompute, "ROUND_SIZE", 12)
    precompute.precompute(engine, chunks(12))
    assert waiting[0] == 0 and all(0 < count <= 3 for count in waiting[1:])


def test_an_interrupted_run_resumes():
    engine = Engine()
    precompute.precompute(engine, chunks(4))
    assert precompute.precompute(engine, chunks(6)) == 4
    assert engine.computed == [[f"chunk {i}" for i in range(3)], ["chunk 3"], [], ["chunk 4", "chunk 5"]]


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


@pytest.mark.parametrize("room", [1, 2, 4])
def test_what_a_small_host_loses_is_computed_again(room):
    engine = Engine(room=room)
    assert precompute.precompute(engine, chunks(11)) == 0
    assert set(engine.stored) == texts(11) and len(engine.stored) == 11


def test_a_duplicate_is_stored_once():
    engine = Engine()
    precompute.precompute(engine, chunks(3)[:2] * 2)
    assert len(engine.stored) == 2 and sum(map(len, engine.computed)) == 2


def test_a_corpus_is_read_while_it_is_computed():
    engine, read = Engine(), []

    def corpus():
        for i, chunk in enumerate(chunks(20)):
            assert i <= len(engine.stored) + 6
            read.append(i)
            yield chunk

    precompute.precompute(engine, corpus())
    assert len(read) == 20


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
    assert args.model_path == "m" and flags.config == LazyConfig(storage_writers=8)
    assert flags.rest[:4] == ["--model-path", "m", "--log-level", "error"]
    assert flags.rest[4:] == ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", "--tp", "2"]
    for more, reason in (
        ([], "--hicache-storage-backend is missing"),
        (["--device", "cpu"], "flags of the engine follow after --, as in: -- --device cpu"),
        (["--", "--hicache-storage-backend=file", "--lazy-max-chunks", "0"], "argument --lazy-max-chunks: must be at"),
    ):
        with pytest.raises(SystemExit) as ended:
            precompute.parse_args(["--model-path", "m", "--chunks", "c", *more])
        assert ended.value.code == 2 and "precompute: error: " in (shown := capsys.readouterr().err) and reason in shown

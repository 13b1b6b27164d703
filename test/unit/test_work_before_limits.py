"""Work that a request causes before it is refused: no more than an allowed one's, and none that others wait for."""

import asyncio
import itertools
import threading
import time
import tracemalloc
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from fakes.server import FakeServer, new_frontend
from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.core.segments import ChunkLimit, TooManyChunks, parse_segments
from sglang_lazy.port.serving import frontend
from sglang_lazy.port.serving.chat import ChatRequest
from sglang_lazy.port.serving.completions import CompletionsRequest
from sglang_lazy.port.serving.messages import MessagesRequest
from sglang_lazy.port.serving.responses import ResponsesRequest
from sglang_lazy.port.serving.tokenizer_manager import begin, tokenize_texts
from sglang_lazy.serving.chat import ChunkParts
from sglang_lazy.serving.known_chunks import KnownChunks, with_tokens
from sglang_lazy.serving.text import segments_in
from sglang_lazy.serving.threads import LARGE, TURN, Outcome, finished, give_way, in_thread

MOST = 3
LIMIT = ChunkLimit(MOST)
CHUNK = {"type": "chunk", "text": "a"}
DOCUMENT = {"type": "document", "source": {"type": "text", "data": "a"}}


class Counted(list):
    """A long list that counts the elements read."""

    read = 0

    def __iter__(self):
        for element in super().__iter__():
            self.read += 1
            yield element


@pytest.fixture(autouse=True)
def _process(monkeypatch):
    process = new_frontend(FakeServer(context_len=8), max_chunks=MOST)
    monkeypatch.setattr(frontend, "current", lambda: process)


@pytest.mark.parametrize(
    "take",
    [
        lambda parts: ChunkParts(limit=LIMIT).take_from_content(parts, "content"),
        lambda parts: parse_segments(parts, limit=LIMIT),
        lambda parts: with_tokens(KnownChunks(), parts, None, limit=LIMIT),
        lambda parts: frontend.current().prompts.to_generate_args(parts),
    ],
)
def test_chunks_are_counted_while_they_are_taken(take):
    take([{"type": "chunk", "input_ids": [1]}] * MOST)
    parts = Counted([{"type": "chunk", "input_ids": [1]}] * 100)
    with pytest.raises(TooManyChunks, match="more than the 3 chunks that are allowed"):
        take(parts)
    assert parts.read == MOST + 1


@pytest.mark.parametrize(
    "model, fields",
    [
        (ChatRequest, lambda parts: {"messages": [{"role": "user", "content": parts}]}),
        (MessagesRequest, lambda parts: {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}),
        (MessagesRequest, lambda parts: {"system": parts, "messages": [], "max_tokens": 1}),
        (ResponsesRequest, lambda parts: {"input": [{"role": "user", "content": parts}]}),
        (ResponsesRequest, lambda parts: {"input": [{"type": "function_call_output", "output": parts}]}),
    ],
)
@pytest.mark.parametrize("part", [CHUNK, {"type": "text", "text": "#a#"}])
def test_apis_stop_at_the_limit(model, fields, part):
    """And answer at once: as an error of validation, it would be reported together with the body."""
    parts = Counted([part] * 100)
    with pytest.raises(HTTPException, match="400: the prompt has more than the 3 chunks"):
        model.model_validate({"model": "m", "chunk_separator": "#", **fields(parts)})
    assert parts.read == MOST + 1


@pytest.mark.parametrize(
    "take",
    [
        lambda text: segments_in(text, "#", LIMIT),
        lambda text: segments_in(["a", text], "#", LIMIT),
        lambda text: ChunkParts("#", limit=LIMIT).take_from_content(text, "content"),
        lambda text: CompletionsRequest.model_validate({"prompt": text, "chunk_separator": "#"}),
        lambda text: ChatRequest.model_validate(
            {"messages": [{"role": "user", "content": text}], "chunk_separator": "#"}
        ),
    ],
)
@pytest.mark.parametrize("piece", ["a#", "#"])
def test_text_with_too_many_separators_is_not_split(take, piece):
    text = piece * 500_000
    tracemalloc.start()
    try:
        with pytest.raises((TooManyChunks, HTTPException), match="500000 chunk separators, but at most 3"):
            take(text)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    finally:
        tracemalloc.stop()


def test_separators_of_all_messages_count_together():
    parts = ChunkParts("#", limit=LIMIT)
    with pytest.raises(TooManyChunks, match="14 chunk separators"):
        parts.take_from([{"role": "user", "content": "##"}] * 100)


def test_blanks_between_separators_are_allowed():
    text = "##".join(itertools.chain.from_iterable(("", f"{i}", "", "\n") for i in range(MOST)))
    LIMIT.check_separators(text.count("##"))


def test_what_limits_the_chunks():
    prompts = frontend.current().prompts
    for link in (None, "base+epic", "no policy"):
        assert prompts.limit(link) == (MOST, "--lazy-max-chunks")
    for link in ("full", ["block", None]):
        assert prompts.limit(link) == (8, "the model's context length")
    with pytest.raises(TooManyChunks, match="the 8 chunks that are allowed"):
        prompts.to_generate_args([{"type": "chunk", "input_ids": [1]}] * 9, link="full")


def test_tokens_of_known_chunks_are_counted_before_they_are_copied():
    known = KnownChunks()
    known.add(None, [1] * 5)
    name = chunk_id(tokens_digest([1] * 5))
    segments = with_tokens(known, [{"type": "chunk", "id": name}] * 2, None, limit=LIMIT)
    with pytest.raises(ValueError, match="at least 10 tokens"):
        frontend.current().prompts.to_generate_args(segments)


# Threads


def threads_of(size):
    async def run():
        return threading.get_ident(), await in_thread(size, threading.get_ident)

    return asyncio.run(run())


def test_only_large_requests_take_a_thread():
    here, there = threads_of(LARGE - 1)
    assert here == there
    here, there = threads_of(LARGE)
    assert here != there


def test_the_event_loop_goes_on_while_a_text_is_tokenized():
    """However long that takes: here, until the event loop has gone on."""
    manager = SimpleNamespace(async_dynamic_batch_tokenizer=None)

    async def run(texts):
        loop_went_on = threading.Event()

        async def tokenize(_manager, texts, is_pair=False):
            assert loop_went_on.wait(60)
            return texts, is_pair

        asyncio.get_running_loop().call_soon(loop_went_on.set)
        return await tokenize_texts(tokenize, manager, texts, is_pair=True)

    for texts in ("a" * LARGE, ["a" * (LARGE // 2)] * 2, [["a", "a" * LARGE]]):
        assert asyncio.run(run(texts)) == (texts, True)


def test_sglangs_own_tokenizer_of_batches_is_left_alone():
    async def tokenize(manager, _texts):
        await asyncio.sleep(0)
        return manager

    for batches, text in ((object(), "a" * LARGE), (None, "a")):
        manager = SimpleNamespace(async_dynamic_batch_tokenizer=batches)
        assert asyncio.run(tokenize_texts(tokenize, manager, text)) is manager


@pytest.mark.parametrize("together", [False, True])
def test_a_batch_of_prompts_gives_way(together):
    """Each prompt is small, but all of them together would hold the event loop. SGLang tokenizes them one by one, or,
    for several samples of each, in tasks."""
    turns = 0

    async def other():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def tokenize():
        await give_way()
        time.sleep(TURN)

    async def run():
        task = asyncio.ensure_future(other())
        begin(lambda *_request: None, None, None)
        if together:
            await asyncio.gather(*(tokenize() for _ in range(10)))
        else:
            for _ in range(10):
                await tokenize()
        task.cancel()

    asyncio.run(run())
    assert turns >= 8


def test_an_outcome_repeats_its_call():
    assert Outcome(int, "3")() == 3
    failed = Outcome(int, "x")
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            failed("ignored")


def test_a_coroutine_that_waits_is_no_work_for_a_thread():
    async def waits():
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="it waits: .*waits"):
        finished(waits())

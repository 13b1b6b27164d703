"""Responses stored for others to follow: the latest of them, however many clients store."""

import asyncio
import gc
import tracemalloc
from types import SimpleNamespace

import pytest
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest, ResponsesResponse
from sglang.srt.entrypoints.openai.serving_responses import _MediaInputValidationError

from sglang_lazy.port.repairs import http
from sglang_lazy.port.serving.responses import make_request
from sglang_lazy.serving.chat import ChunkParts, History

CAPACITY = 1 << 20


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.setattr(http, "CAPACITY", CAPACITY)
    serving = SimpleNamespace()
    http.bound(None, serving)
    return serving


def store(serving, name, length):
    """As SGLang does: first the messages, then the response."""
    parts = ChunkParts()
    content = parts.take_from_content([{"type": "chunk", "text": "a" * length + name}], "content")
    serving.msg_store[name] = History([{"role": "user", "content": content}], parts)
    request = ResponsesRequest(model="m", input="x" * length)
    response = ResponsesResponse.from_request(
        request, {}, model_name="m", created_time=0, output=[], status="queued", usage=None
    )
    serving.response_store[name] = response
    return response


def test_a_response_and_its_messages_are_found_until_both_are_forgotten(serving):
    first = store(serving, "first", 10_000)
    assert serving.response_store.get("first") is first and len(serving.msg_store["first"]) == 1
    for number in range(200):
        store(serving, str(number), 10_000)
        assert serving.response_store.get("first") is first, "it is used"
    assert (
        serving.msg_store.get("0") is None is serving.response_store.get("0") and serving.msg_store.get("0", []) == []
    )
    assert len(serving.msg_store["199"]) == 1 and serving.response_store.get("199") is not None


def test_a_response_without_its_messages_cannot_be_followed(serving):
    """It was found, and then forgotten by the time that its messages are needed; or these were too large to store."""
    earlier = store(serving, "resp_large", CAPACITY)
    assert serving.response_store.get("resp_large") is earlier
    request = ResponsesRequest(model="m", input="x", previous_response_id="resp_large")
    request._chunk_parts = ChunkParts()

    async def make(_serving, _request, earlier, _tokenizer):
        return serving.msg_store[earlier.id]

    earlier.id = "resp_large"
    with pytest.raises(_MediaInputValidationError, match="^resp_large is no longer stored with its messages"):
        asyncio.run(make_request(make, serving, request, earlier, None))


@pytest.mark.parametrize("length", [1, 1000])
def test_they_take_no_more_memory_than_they_say(serving, length):
    store(serving, "imports", 1)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1000):
            store(serving, str(number), length)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 1.2 * CAPACITY
    finally:
        tracemalloc.stop()
    assert serving.response_store.get("999") is not None

"""What the picker reads from requests and answers."""

import json

import pytest

from sglang_lazy.routing import chunks_in, hits_by_chunk
from sglang_lazy.routing.bodies import MOST

CHUNK = {"type": "chunk", "text": "a document"}
TEXT = {"type": "text", "text": "a question"}
RESULT = {"type": "search_result", "title": "one", "content": [TEXT]}


def names(**body):
    return [name for name, _ in chunks_in(body)]


@pytest.mark.parametrize(
    "body",
    [
        {"segments": [TEXT, CHUNK, TEXT]},
        {"segments": [[TEXT], [CHUNK, TEXT]]},
        {"messages": [{"role": "user", "content": "Read:"}, {"role": "user", "content": [CHUNK, TEXT]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [CHUNK]}]}]},
        {"system": [TEXT, {**CHUNK, "cache_control": {"type": "ephemeral"}}], "messages": []},
        {"input": [{"role": "user", "content": [CHUNK]}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [CHUNK]}]},
        {"segments": [CHUNK], "link": "epic:tokens=4", "model": "llama"},
    ],
    ids=str,
)
def test_a_chunk_has_one_name_wherever_it_stands(body):
    assert chunks_in(body) == chunks_in({"segments": [CHUNK]})
    assert chunks_in(body)[0][1] == len(CHUNK["text"])


def test_chunks_with_different_kv_have_different_names():
    plain = {"segments": [CHUNK]}
    others = [
        {"cache_salt": "tenant"},
        {"extra_key": "key"},
        {"lora_path": "legal"},
        {"link": "packet"},
        {"link": "base"},
        {"link": "base:preamble=lead"},
        {"segments": [{**CHUNK, "text": "another"}]},
    ]
    found = [names(**{**plain, **other})[0] for other in [{}, *others]]
    assert len(set(found)) == len(found)
    assert names(**plain, lora_path="legal") == names(**plain, model="llama:legal")
    assert names(**plain, link="base") == names(**plain, link="base+query:ratio=0.3")


def test_a_body_with_too_many_chunks_is_left_to_the_server():
    """And only as many are read: another request waits meanwhile."""

    class Counted(list):
        read = 0

        def __iter__(self):
            for element in super().__iter__():
                self.read += 1
                yield element

    segments = Counted([CHUNK] * MOST)
    assert len(chunks_in({"segments": segments})) == MOST
    segments = Counted([CHUNK] * (2 * MOST))
    assert chunks_in({"segments": segments}) == [] and segments.read == MOST + 1


def test_all_chunks_are_seen_in_order():
    tokens, named = {"type": "chunk", "input_ids": [1, 2]}, {"type": "chunk", "id": "5f2b6c01a9d3e847"}
    body = {"system": [tokens], "messages": [{"role": "user", "content": [RESULT, TEXT, named, CHUNK, CHUNK]}]}
    found = chunks_in(body)
    assert [name for name, _ in found[2:4]] == [names(segments=[named])[0], names(segments=[CHUNK])[0]]
    assert len(found) == 5 and found[3] == found[4] and all(size > 0 for _, size in found)


@pytest.mark.parametrize(
    "body",
    [None, [], "text", {}, {"text": "chunk"}, {"segments": [TEXT]}, {"segments": "chunk"}, {"messages": {"a": CHUNK}},
     {"segments": [CHUNK], "link": "full"}, {"tools": [CHUNK]}],
    ids=str,
)  # fmt: skip
def test_bodies_without_chunks(body):
    assert chunks_in(body) == []


def test_hits_are_read_from_answers():
    chunks = [("a", 1), ("b", 1)]
    report = [{"id": "0", "hit": True}, {"id": "1", "hit": False}]
    one = {"text": '"chunks":', "meta_info": {"chunks": report}}
    for answer in (one, [one, one], {"choices": [{"index": 0, "meta_info": {"chunks": report}}]}):
        line = json.dumps(answer, separators=(",", ":")).encode()
        assert hits_by_chunk(chunks, line) == hits_by_chunk(chunks, b"data: " + line) == {"a": True, "b": False}
        assert hits_by_chunk(chunks[:1], line) == {}  # hits of other chunks, as in a batch
    assert hits_by_chunk(chunks, b"") == hits_by_chunk(chunks, b"data: [DONE]") == {}
    for broken in (b'{"chunks":', b'{"chunks":[1]}', b'{"meta_info":{"chunks":3}}'):
        assert hits_by_chunk(chunks, broken) == {}

"""Text that becomes chunks: by separators, by roles, and as Anthropic's blocks."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest
from test_serving_tokenization import byte_level

from fakes.server import new_frontend
from sglang_lazy import chunk
from sglang_lazy.core.config import ENV_VAR
from sglang_lazy.entrypoints.engine import Engine
from sglang_lazy.port.serving import frontend
from sglang_lazy.port.serving.chat import ChatRequest
from sglang_lazy.serving.blocks import BLOCKS
from sglang_lazy.serving.chat import ChunkParts
from sglang_lazy.serving.text import segments_in


def spelled(parts, content):
    """A message's content, with chunks in braces in place of their placeholders."""
    texts, indices = parts.split(content if isinstance(content, str) else "".join(part["text"] for part in content))
    chunks = [parts.parts[index]["text"] for index in indices]
    return texts[0] + "".join(f"{{{chunk}}}{text}" for chunk, text in zip(chunks, texts[1:], strict=True))


@pytest.mark.parametrize(
    "given, as_text, as_role",
    [
        ("a", "a", "{a}"),
        ("a##b", None, "{a}{b}"),
        ("a##b##c", "a{b}c", "{a}{b}{c}"),
        ("##b####c##", "{b}{c}", "{b}{c}"),
        ("##a## Compare with: ##b##", "{a} Compare with: {b}", "{a}{ Compare with: }{b}"),
        ("##a##\n\n##b##", "{a}\n\n{b}", "{a}\n\n{b}"),
        ("a## \n##b", "a \nb", "{a} \n{b}"),
        ("a##b##c##d", None, "{a}{b}{c}{d}"),
        ("###a###", "{#a}#", "{#a}#".replace("}#", "}{#}")),
        ("", "", ""),
        (" ", " ", " "),
    ],
)
def test_separators_and_roles(given, as_text, as_role):
    """as_text: None for an odd number of separators."""
    parts = ChunkParts("##", ["tool"])
    if as_text is None:
        with pytest.raises(ValueError, match=r"messages\[0\].content: . of the chunk separator '##'.*'##A####B##'"):
            parts.take_from([{"role": "user", "content": given}])
    else:
        (message,) = parts.take_from([{"role": "user", "content": given}])
        assert spelled(parts, message["content"]) == as_text
    (message,) = parts.take_from([{"role": "tool", "content": [{"type": "text", "text": given}]}])
    assert spelled(parts, message["content"]) == as_role
    (message,) = parts.take_from([{"type": "function_call_output", "output": given}], "input")
    assert spelled(parts, message["output"]) == as_role
    content = [{"type": "tool_result", "content": given}]
    (message,) = parts.take_from([{"role": "user", "content": content}])
    assert spelled(parts, message["content"][0]["content"]) == as_role


@pytest.mark.parametrize("seed", range(20))
def test_splitting_undoes_joining(seed):
    """Random texts and chunks joined by separators: every chunk is found, and no text is lost."""
    rng = random.Random(seed)

    def word():
        return "".join(rng.choices("ab c#\n", k=rng.randint(1, 6))).strip("#") or "x"

    given = [word() if place % 2 else rng.choice(["", " ", word()]) for place in range(2 * rng.randint(0, 5) + 1)]
    segments = segments_in("<|>".join([*given, "<|>", "<|>"]), "<|>")
    assert [segment["text"] for segment in segments if segment["type"] == "chunk"] == [
        w for w in given[1::2] if w.strip()
    ]
    assert "".join(segment["text"] for segment in segments) == "".join(given)
    assert all(pair != ("text", "text") for pair in itertools.pairwise(segment["type"] for segment in segments))
    parts = ChunkParts("<|>")
    content = parts.take_from_content("<|>".join(given), "input")
    assert spelled(parts, content) == "".join(f"{{{w}}}" if i % 2 and w.strip() else w for i, w in enumerate(given))


def test_without_a_separator_plain_text_stays_text():
    assert (
        segments_in("a##b", "") is segments_in("a b", "##") is segments_in(None, "##") is segments_in([5], "#") is None
    )
    assert segments_in(["a##b##", "c"], "##") == [
        [{"type": "text", "text": "a"}, {"type": "chunk", "text": "b"}],
        [{"type": "text", "text": "c"}],
    ]
    with pytest.raises(ValueError, match="1 of the chunk separator '##'"):
        segments_in(["a##b##", "c##"], "##")


def test_requests_override_flags(monkeypatch):
    process = new_frontend(chunk_separator="##", chunk_roles="tool, function")
    monkeypatch.setattr(frontend, "current", lambda: process)
    prompts = process.prompts
    assert (prompts.separator(None), prompts.separator(""), prompts.separator("--")) == ("##", "", "--")

    def chunks(role, **fields):
        message = {"role": role, "content": "a##b##c", "tool_call_id": "1"}
        request = ChatRequest.model_validate({"messages": [message], **fields})
        return [part["text"] for part in request._chunk_parts.parts]

    assert chunks("user") == ["b"] and chunks("tool") == chunks("function") == ["a", "b", "c"]
    assert chunks("user", chunk_roles=["user"]) == ["a", "b", "c"] and chunks("tool", chunk_roles=[]) == ["b"]
    assert chunks("tool", chunk_separator="") == ["a##b##c"] and chunks("user", chunk_separator="") == []


def test_an_engine_finds_separators_in_its_prompts(monkeypatch):
    manager = SimpleNamespace(
        tokenizer=byte_level(), preferred_sampling_params=None, model_config=SimpleNamespace(vocab_size=400),
        context_len=100, allow_auto_truncate=False,
    )  # fmt: skip
    engine = Engine.__new__(Engine)
    engine.tokenizer_manager = manager
    monkeypatch.setenv(ENV_VAR, json.dumps({"chunk_separator": "##"}))
    params = {"temperature": 0}

    def made(*args, link=None, cache_salt=None, **kwargs):
        return engine._arguments(args, kwargs, None, cache_salt, link)

    segments = ["Read: ", {"type": "chunk", "text": "the sea"}, "Who?"]
    expected = engine._arguments((), {"sampling_params": params}, segments, "s", "epic")
    assert made("Read: ##the sea##Who?", params, link="epic", cache_salt="s") == expected
    assert made(prompt="Read: ##the sea##Who?", sampling_params=params, link="epic", cache_salt="s") == expected
    assert len(made(["Read: ##the sea##Who?", "Who?"], params)[1]["input_ids"]) == 2
    plain = made("Of which type?", params, stream=True, cache_salt="s")  # a word that a segment has for a key
    assert plain == (("Of which type?", params), {"stream": True, "cache_salt": "s"})


@pytest.mark.parametrize(
    "prompt", [chunk("doc"), ["a", chunk("doc")], [["a", chunk("doc")]], ["a", {"type": "chunk", "text": "doc"}]]
)
def test_an_engine_says_where_segments_go(prompt):
    engine = Engine.__new__(Engine)
    for args, kwargs in (((prompt,), {}), ((), {"prompt": prompt})):
        with pytest.raises(ValueError, match=r"pass segments=\[…\]"):
            engine._arguments(args, kwargs, None, None, None)


def test_chunks_of_an_earlier_turn():
    earlier, later = ChunkParts(), ChunkParts()
    first = earlier.take_from([{"role": "user", "content": [{"type": "chunk", "text": "a"}]}])
    second = later.take_from([{"role": "user", "content": [{"type": "chunk", "text": text} for text in "bc"]}])
    both = later.continuing(earlier)
    assert spelled(both, second[0]["content"] + first[0]["content"]) == "{b}{c}{a}"
    third = both.continuing(both)
    assert spelled(third, first[0]["content"]) == "{a}"


def test_document_blocks():
    def read(**block):
        return BLOCKS[block["type"]](block)

    texts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    result = dict(type="search_result", title="T", source="S", content=texts)
    assert read(**result) == "Title: T\nSource: S\nContent: a\nb"
    assert read(**{**result, "title": None, "source": {"url": "U"}}) == "Source: U\nContent: a\nb"
    assert (
        read(type="document", context="C", source={"type": "content", "content": texts}) == "Context: C\nContent: a\nb"
    )
    assert read(type="document", source={"type": "content", "content": "a"}) == "Content: a"
    assert read(type="document", source={"type": "text", "data": "a"}) == "Content: a"
    for source in (None, "x", {"type": "url", "url": "x"}, {"type": "text", "data": 3}, {"type": "content"}):
        with pytest.raises(ValueError, match="document"):
            read(type="document", source=source)

"""Chat: chunk parts keep their boundaries through any template, and no document can forge one."""

from array import array
from types import SimpleNamespace

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from test_serving_tokenization import byte_level, metaspace

from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout, Segment
from sglang_lazy.port.serving.chat import ChatRequest, convert_request
from sglang_lazy.serving.chat import ChunkParts, PlaceholderTokenizer
from sglang_lazy.serving.tokenization import SegmentTokenizer

pytestmark = pytest.mark.usefixtures("http_process")

TEMPLATES = {
    "joined": lambda parts: " ".join(parts),
    "stripped": lambda parts: "\n".join(part.strip() for part in parts),
    "twice": lambda parts: "".join(parts) + "|" + "".join(parts),
}


def part(kind, text):
    return {"type": kind, "text": text}


def chat(*parts, **fields):
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": list(parts)}], **fields})


class Serving:
    """Stands in for `OpenAIServingChat`: renders the parts of all messages and encodes the result."""

    _apply_conversation_template = None

    def __init__(self, tokenizer, template=TEMPLATES["joined"], prefix=None):
        self.tokenizer_manager = SimpleNamespace(
            tokenizer=tokenizer, preferred_sampling_params=None,
            model_config=SimpleNamespace(vocab_size=400, is_multimodal=False),
        )  # fmt: skip
        self.template, self.prefix = template, prefix

    def _apply_jinja_template(self, request):
        texts = [part.text for message in request.messages for part in message.content]
        tokenizer = self.tokenizer_manager.tokenizer
        return tokenizer.encode(f"U: {self.template(texts)} A:")

    def convert(self, request, raw_request):
        tokenizer = self.tokenizer_manager.tokenizer
        input_ids = self._apply_jinja_template(request)
        if self.prefix is not None:
            input_ids = input_ids + tokenizer.encode(self.prefix)
        extra_key = (request.cache_salt or "") + (request.extra_key or "")
        params = {"custom_params": {"mine": 1}}
        return GenerateReqInput(input_ids=input_ids, sampling_params=params, extra_key=extra_key or None), request


def convert(serving, request):
    adapted, same = convert_request(Serving.convert, serving, request, None)
    assert same is request
    custom_params = adapted.sampling_params["custom_params"]
    assert custom_params["mine"] == 1
    layout = PromptLayout.unpack(custom_params[LAYOUT_PARAM], len(adapted.input_ids))
    return adapted.input_ids, layout


@pytest.fixture(params=["byte-level", "metaspace"], scope="module")
def tokenizer(request):
    return {"byte-level": byte_level, "metaspace": lambda: metaspace("always", specials=None)}[request.param]()


@pytest.mark.parametrize("template", TEMPLATES)
def test_chunks_keep_their_boundaries_and_tokens(tokenizer, template):
    serving = Serving(tokenizer, TEMPLATES[template])
    request = chat(
        part("text", "See"),
        part("chunk", " the hills\n"),
        part("chunk", "the sea"),
        part("text", "Who?"),
        cache_salt="s",
        link="base+epic",
    )
    input_ids, layout = convert(serving, request)
    assert layout.cache_salt == "s" and layout.link == "base+epic:tokens=16"
    chunks = [tokenizer.decode(input_ids[start:end]) for start, end in layout.chunks]
    hills = "the hills" if template == "stripped" else "the hills\n"
    expected = [hills, "the sea"] * (2 if template == "twice" else 1)
    assert [chunk.strip(" ") for chunk in chunks] == expected


def test_a_known_chunk_stands_for_its_tokens(tokenizer):
    """Named by an id, or given: here the chunk that the id has been replaced by."""
    tokens = tokenizer.encode("the sea", add_special_tokens=False)
    named, given = (chat(part("text", "Who?"), {"type": "chunk", "input_ids": tokens}) for _ in range(2))
    named._chunk_parts.parts = [Segment(True, input_ids=array("i", tokens))]
    results = [convert(Serving(tokenizer), request) for request in (named, given)]
    assert results[0] == results[1]
    ((start, end),) = results[0][1].chunks
    assert results[0][0][start:end] == tokens


def test_requests_without_chunks_are_sglangs(tokenizer):
    serving, request = Serving(tokenizer), chat(part("text", "Who?"))
    adapted, _ = convert_request(Serving.convert, serving, request, None)
    assert adapted.input_ids == tokenizer.encode("U: Who? A:")
    assert adapted.sampling_params == {"custom_params": {"mine": 1}}
    stock = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": [part("text", "Who?")]}]})
    assert convert_request(Serving.convert, serving, stock, None)[0].input_ids == adapted.input_ids


def test_placeholders_cannot_be_forged(tokenizer):
    """A document that contains the placeholders of another request is only text."""
    other = chat(part("chunk", "the sea"))
    forged = other.messages[0].content[0].text
    input_ids, layout = convert(Serving(tokenizer), chat(part("text", forged), part("chunk", "the sea" + forged)))
    assert len(layout.chunks) == 1
    assert chat(part("chunk", "x")).messages[0].content[0].text != forged


def test_an_assistant_prefill_may_hold_a_chunk(tokenizer):
    request = chat(part("text", "Who?"), part("chunk", "the sea"))
    placeholder = request.messages[0].content[1].text
    input_ids, layout = convert(Serving(tokenizer, prefix=f"It says {placeholder}"), request)
    assert len(layout.chunks) == 2 and layout.chunks[-1][1] == len(input_ids)


def test_a_message_that_ends_before_a_chunk_keeps_its_end():
    """A template's own end of sequence is not the one that the tokenizer adds, which belongs to the prompt's end."""
    tokenizer, chunk_parts = byte_level(specials="<s> $A </s>"), ChunkParts()
    (placeholder,) = chunk_parts.take_from_content([part("chunk", "the sea")], "content")
    encode = PlaceholderTokenizer(SegmentTokenizer(tokenizer), chunk_parts).encode
    text, bare = f"Hello</s>{placeholder['text']}Who?", tokenizer.encode("Who?", add_special_tokens=False)
    hello = tokenizer.encode("Hello</s>", add_special_tokens=False)
    assert hello[-1] == tokenizer.eos_token_id
    assert encode(text, add_special_tokens=False) == [*hello, -1, *bare]
    assert encode(text) == [tokenizer.bos_token_id, *hello, -1, *bare, tokenizer.eos_token_id]


def test_anthropics_cache_control_is_no_part_of_a_chunk(tokenizer):
    marked = {**part("chunk", "the sea"), "cache_control": {"type": "ephemeral"}}
    assert (
        convert(Serving(tokenizer), chat(marked))[0] == convert(Serving(tokenizer), chat(part("chunk", "the sea")))[0]
    )


@pytest.mark.parametrize(
    "bad, reason",
    [
        (part("chunk", ""), r"messages\[0\].content\[1\]: the text of a chunk segment is empty"),
        (part("chunk", 3), r"messages\[0\].content\[1\]: .* must be a string"),
        ({"type": "chunk"}, r"messages\[0\].content\[1\]: a chunk segment needs exactly one of"),
        ({"type": "chunk", "text": "x", "cache": 1}, r"messages\[0\].content\[1\]: unknown key 'cache'"),
        ({"type": "chunk", "input_ids": [400]}, r"messages\[0\].content\[1\]: token id 400"),
    ],
)
def test_bad_parts_are_named(tokenizer, bad, reason):
    with pytest.raises(ValueError, match=reason):
        convert(Serving(tokenizer), chat(part("text", "See"), bad))


@pytest.mark.parametrize("kind", [None, 3, [], {}])
def test_parts_of_other_types_are_left_to_sglang(kind):
    content = [{"type": kind, "text": "a"}]
    with pytest.raises(ValidationError):
        ChatRequest(model="m", messages=[{"role": "user", "content": content}])
    assert ChunkParts(blocks={"document": str}).take_from_content(content, "content") == content


def test_a_chunk_dropped_by_the_template_is_an_error(tokenizer):
    serving = Serving(tokenizer, template=lambda parts: parts[0])
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\].*leaves this chunk out"):
        convert(serving, chat(part("text", "See"), part("chunk", "the sea")))


def test_options_that_exclude_chunk_parts(tokenizer):
    with pytest.raises(ValueError, match="input_ids"):
        convert(Serving(tokenizer), chat(part("chunk", "x"), input_ids=[1]))
    with pytest.raises(ValueError, match="cache_salt must be a non-empty string"):
        convert(Serving(tokenizer), chat(part("chunk", "the sea"), cache_salt=""))
    with pytest.raises(ValueError, match="link must be one of"):
        convert(Serving(tokenizer), chat(part("chunk", "the sea"), link="half"))
    with pytest.raises(ValueError, match="ratio must be above 0 and at most 1, got 0.0"):
        convert(Serving(tokenizer), chat(part("chunk", "the sea"), link="query:ratio=0"))
    with pytest.raises(ValueError, match="link needs a prompt with chunk parts"):
        convert(Serving(tokenizer), chat(part("text", "the sea"), link="full"))


def test_fields_that_would_be_dropped_are_refused(tokenizer):
    documents = {"chat_template_kwargs": {"documents": [{"text": "the sea"}]}}
    for fields in ({}, {"link": "full", "chunk_separator": "##"}):
        with pytest.raises(ValueError, match="documents in chat_template_kwargs are text: give them as chunk parts"):
            convert(Serving(tokenizer), chat(part("text" if fields else "chunk", "Who?"), **documents, **fields))
    for fields in ({"chunk_separator": "##"}, {"chunk_roles": ["user"]}):
        with pytest.raises(ValueError, match="divide messages, which input_ids replace"):
            convert(Serving(tokenizer), chat(part("text", "Who?"), input_ids=[1], **fields))
    for fields in (documents, {"input_ids": [1], "chunk_separator": ""}):
        plain, _ = convert_request(Serving.convert, Serving(tokenizer), chat(part("text", "Who?"), **fields), None)
        assert plain.sampling_params == {"custom_params": {"mine": 1}}, "SGLang alone would take them"


def test_the_cache_salt_is_not_added_twice(tokenizer):
    """SGLang's conversion puts the salt into extra_key; with chunks it travels in the layout, which adds it later."""
    request = chat(part("chunk", "the sea"), cache_salt="s", extra_key="e")
    adapted, _ = convert_request(Serving.convert, Serving(tokenizer), request, None)
    assert adapted.extra_key == "e"

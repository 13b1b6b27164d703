"""Chunks under chat templates that do something with content: the prompt is what the template makes of plain text."""

import contextlib
import inspect
import itertools
import json
import re
import time
from types import SimpleNamespace

import pytest
from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.jinja_template_utils import detect_jinja_template_content_format
from test_serving_tokenization import byte_level, legacy

from sglang_lazy.core.segments import LAYOUT_PARAM, PromptLayout
from sglang_lazy.port.serving.chat import ChatRequest, convert_request
from sglang_lazy.serving.chat import ChunkParts
from sglang_lazy.serving.rendering import Rendering
from sglang_lazy.serving.tokenization import SegmentTokenizer

pytestmark = pytest.mark.usefixtures("sglang_context", "http_process")

PLAIN, PADDED = "The river rises in the hills.", " \n The river\n\n"
QUOTED = 'He said "no", and C:\\new\nÜber <b>&</b> it\'s\tgone \u2028 \x07'
THOUGHT, ANSWER = "First\n</think>\n\nthen", "<tool_response>\nfound\n</tool_response>"
BLANK, QUOTE, BACKSLASH = "\n", '"', "\\"
DOCUMENTS = (PLAIN, PADDED, QUOTED, THOUGHT, ANSWER, BLANK, QUOTE, BACKSLASH)


def stock(serving, request, raw_request):
    """SGLang's own conversion, though other tests may have installed our hooks."""
    return inspect.unwrap(OpenAIServingChat._convert_to_internal_request)(serving, request, raw_request)


def each(content, tool="message.content", assistant=None):
    """A template that shows each message by these expressions."""
    return (
        "{% for message in messages %}{{ '<|' + message.role + '|>' }}{% if message.role == 'tool' %}{{ "
        + tool
        + " }}{% elif message.role == 'assistant' %}{{ "
        + (assistant or content)
        + " }}{% else %}{{ "
        + content
        + " }}{% endif %}<|end|>\n{% endfor %}<|assistant|>"
    )


def mistral(version):
    return build_chat_template(
        TemplateConfig(
            version=version,
            spm=False,
            image_support=False,
            audio_support=False,
            thinking_support=False,
            plain_thinking_support=False,
            use_special_token_variables=False,
            model_settings_fields=None,
            reasoning_effort_values=None,
            reasoning_effort_default=None,
        )
    )


AS_LLAMA = each("message.content | trim", "message.content | tojson")
AS_QWEN = each(
    "message.content",
    "'\n<tool_response>\n' + message.content + '\n</tool_response>'",
    "message.content.split('</think>')[-1].lstrip('\n') if '</think>' in message.content else message.content",
)
ASKED_LAST = (
    "{% for message in messages[::-1] %}{% if message.role == 'user' and not (message.content.startswith("
    "'<tool_response>') and message.content.endswith('</tool_response>')) %}{{ loop.index }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "verbatim": each("message.content"),
    "as Llama 3.1": AS_LLAMA,
    "as Qwen 3": AS_QWEN,
    "as Qwen 3, thinking": ASKED_LAST + AS_QWEN,
    "as gpt-oss": each(
        "'' if '<|channel|>' in message.content else message.content",
        "'to=assistant<|channel|>commentary<|message|>' + message.content | tojson",
    ),
    "as DeepSeek": each("message.content", assistant="(message.content.split('</think>') | last).strip()"),
    "as Gemma": "{% set first = messages[0].content | trim + '\n\n' %}{{ first }}" + each("message.content | trim"),
    "parts": "{% for message in messages %}{% for part in message.content %}{{ part.text | trim }}|{% endfor %}"
    "{% endfor %}",
    "parts or text": each("message.content if message.content is string else message.content[0].text"),
    "JSON in ASCII": each("message.content", "message.content | tojson(ensure_ascii=true)"),
    "an object": each("message.content", "{'output': message.content | trim} | tojson(indent=2)"),
    "JSON in JSON": each("message.content", "message.content | tojson | tojson"),
    "upper": each("message.content | upper"),
    "lower": each("message.content.lower()"),
    "replace": each("message.content | replace('river', 'sea')"),
    "escape": each("message.content", "message.content | e"),
    "slice": each("message.content[:40]"),
    "words": each("message.content.split() | join(' ')"),
    "characters": each("message.content", "message.content | list | join('')"),
    "reversed": each("message.content | reverse"),
    "length": each("message.content ~ (message.content | length)"),
    "ends": each("message.content ~ ('!' if message.content.startswith('The river ') else '')"),
    "twice, differently": each("message.content ~ message.content | tojson"),
    "a condition": each("'[quoted]' ~ message.content if '\"' in message.content else message.content"),
    "Mistral v3": mistral(TokenizerVersion.v3),
    "Mistral v7": mistral(TokenizerVersion.v7),
    "Mistral v13": mistral(TokenizerVersion.v13),
    "conversation: llama_3_vision": None,
    "conversation: chatml": None,
}


def serving(template, name=None, tokenizer=None):
    """SGLang's own, with a tokenizer that spells every text."""
    tokenizer = tokenizer or byte_level()
    tokenizer.chat_template = template
    arguments = dict(tool_call_parser=None, reasoning_parser=None, default_chat_template_kwargs=None)
    config = SimpleNamespace(
        vocab_size=400,
        is_multimodal=False,
        get_default_sampling_params=dict,
        hf_config=SimpleNamespace(model_type="", architectures=["LlamaForCausalLM"]),
    )
    manager = SimpleNamespace(
        tokenizer=tokenizer, model_config=config, preferred_sampling_params=None, served_model_name="m",
        server_args=SimpleNamespace(**arguments), config_value=arguments.__getitem__, model_path="m",
    )  # fmt: skip
    content = detect_jinja_template_content_format(template) if template else "string"
    templates = SimpleNamespace(
        chat_template_name=name,
        jinja_template_content_format=content,
        python_chat_template=None,
        jinja_template_may_reorder_tool_results=False,
        reasoning_config=None,
    )
    return OpenAIServingChat(manager, templates)


def converted(serving, kind, conversation, **fields):
    model = ChatRequest if kind == "chunk" else ChatCompletionRequest
    messages = [
        {"role": role, "content": [{"type": kind if document else "text", "text": text} for text, document in parts]}
        | ({"tool_call_id": "callcall1"} if role == "tool" else {})
        for role, *parts in conversation
    ]
    request = model.model_validate({"messages": messages, **fields})
    adapted, _ = convert_request(stock, serving, request) if kind == "chunk" else stock(serving, request, None)
    return adapted


def spelled(serving, adapted):
    return serving.tokenizer_manager.tokenizer.decode(adapted.input_ids)


def chunks(serving, adapted):
    layout = PromptLayout.unpack(adapted.sampling_params["custom_params"][LAYOUT_PARAM], len(adapted.input_ids))
    return [serving.tokenizer_manager.tokenizer.decode(adapted.input_ids[s:e]) for s, e in layout.chunks]


def conversations(document, other):
    """Documents alone, between texts, and side by side, in each role; alone only once, with itself as the other one."""
    ask, call = ("user", ("Who?", False)), ("assistant", ("I look.", False))
    if document == other:
        yield "alone", [("user", (document, True))]
        yield "before", [("user", (document, True), ("Who?", False))]
        yield "after", [("user", ("Read:\n", False), (document, True))]
        yield "system", [("system", ("Read ", False), (document, True)), ask]
        yield "tool", [ask, call, ("tool", (document, True)), ask]
    yield "side by side", [("user", (document, True), (other, True), (document, True))]
    yield "assistant", [ask, ("assistant", (document, True), (other, True)), ask]
    yield "tools", [ask, call, ("tool", ("- ", False), (document, True), (other, True)), ("tool", (other, True)), ask]


ALL = set(DOCUMENTS)
REFUSED = {
    "as Llama 3.1": {BLANK},
    "as Qwen 3": {THOUGHT},
    "as Qwen 3, thinking": {THOUGHT, ANSWER},
    "as DeepSeek": {THOUGHT, BLANK},
    "as Gemma": {BLANK},
    "parts": ALL,  # of tools, whose content SGLang makes a text
    "an object": {BLANK},
    "JSON in JSON": ALL - {PLAIN},
    "upper": ALL,
    "lower": {PLAIN, PADDED, QUOTED, THOUGHT},
    "replace": {PLAIN, PADDED},
    "escape": {QUOTED, THOUGHT, ANSWER, QUOTE},
    "slice": ALL,
    "words": {QUOTED, THOUGHT, ANSWER, BLANK},
    "reversed": ALL,
    "length": ALL,
    "twice, differently": ALL - {PLAIN},
    "ends": {PLAIN},
    "a condition": {QUOTED, QUOTE},
    "conversation: llama_3_vision": {BLANK},
}
"""The documents that a template does not take as chunks in every place; all others it does."""


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_with_chunks_is_what_the_template_makes_of_plain_text(template):
    server, refused = serving(TEMPLATES[template], template.partition("conversation: ")[2] or None), set()
    for document, other in itertools.product(DOCUMENTS, repeat=2):
        for case, conversation in conversations(document, other):
            try:
                expected = spelled(server, converted(server, "text", conversation))
            except ValueError:
                continue  # SGLang refuses the role
            try:
                adapted = converted(server, "chunk", conversation)
            except ValueError as error:
                assert re.match(r"messages\[\d\].content\[\d\]: the model's chat template", str(error))
                refused |= {document} if document == other else set()
                continue
            assert spelled(server, adapted) == expected, (case, document, other)
            assert len(chunks(server, adapted)) >= sum(is_chunk for _, *parts in conversation for _, is_chunk in parts)
    assert refused == REFUSED.get(template, set())


def test_chunks_are_written_as_the_template_writes_text():
    server = serving(AS_LLAMA)
    call = ("assistant", ("I look.", False))
    found = converted(server, "chunk", [("user", ("Who?", False)), call, ("tool", (QUOTED, True))])
    assert chunks(server, found) == [json.dumps(QUOTED, ensure_ascii=False)[1:-1]], "the quotes are text"
    stripped = converted(server, "chunk", [("user", (PADDED, True), (PADDED, True), (PADDED, True))])
    assert chunks(server, stripped) == [PADDED.lstrip(), PADDED, PADDED.rstrip()]


def test_refusals_say_what_becomes_of_a_chunk():
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\]: the model's chat template alters this chunk"):
        converted(serving(TEMPLATES["upper"]), "chunk", [("user", ("READ:", False), (PLAIN, True))])
    with pytest.raises(ValueError, match=r"messages\[0\].content\[1\]: .* alters .*: 'The river.*' becomes 'The sea"):
        converted(serving(TEMPLATES["replace"]), "chunk", [("user", ("READ:", False), (PLAIN, True))])
    with pytest.raises(ValueError, match=r"messages\[2\].content\[0\]: .*'found.*' becomes 'found&lt;b&gt;"):
        tool = ("tool", ("found<b>", True))
        converted(serving(TEMPLATES["escape"]), "chunk", [("user", ("Who?", False)), ("assistant", ("", False)), tool])


@pytest.mark.parametrize("tokenizer", [byte_level, legacy])
@pytest.mark.parametrize(
    "template, document, role, taken",  # in letters that both tokenizers know
    [
        ("verbatim", PADDED, "user", True),
        ("as Llama 3.1", PLAIN, "user", True),
        ("as Llama 3.1", PLAIN + "\n", "user", False),
        ("as Llama 3.1", " " + PLAIN, "user", False),
        ("as Llama 3.1", PLAIN, "tool", None),
        ("lower", PLAIN, "user", False),
        ("ends", PLAIN, "user", False),
    ],
)
@pytest.mark.parametrize("times", [1, 29])
def test_chunks_given_by_their_tokens(tokenizer, template, document, role, taken, times):
    """They cannot be altered. Of long ones only the ends are decoded, so they are refused wherever any may be altered.

    taken: None for short ones only.
    """
    server = serving(TEMPLATES[template], tokenizer=tokenizer())
    document = " ".join([document] * times)
    ids = SegmentTokenizer(server.tokenizer_manager.tokenizer).encode_later([document])[0]
    content = [{"type": "chunk", "input_ids": ids}]
    asked, answered = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": ""}
    messages = [asked, answered, {"role": role, "content": content, "tool_call_id": "1"}]
    request = ChatRequest.model_validate({"messages": messages})
    if times == 1 if taken is None else taken:
        adapted, _ = convert_request(stock, server, request)
        assert str(ids)[1:-1] in str(adapted.input_ids)
    else:
        with pytest.raises(ValueError, match="the model's chat template"):
            convert_request(stock, server, request)


def test_an_earlier_turns_chunks_are_not_altered_twice():
    tokenizer, earlier = SegmentTokenizer(byte_level()), ChunkParts()
    (placeholder,) = earlier.take_from_content([{"type": "chunk", "text": QUOTED}], "content")
    for parts in (earlier, ChunkParts().continuing(earlier)):
        Rendering(tokenizer, parts).fit([placeholder["text"]], [json.dumps(QUOTED)[1:-1]])
        assert [segment.text for segment in parts.parse(400)] == [json.dumps(QUOTED)[1:-1]]


@pytest.mark.parametrize("after, refused", [("a", False), ("b", True)])
def test_blanks_take_no_time(after, refused):
    """A megabyte of blanks at each end of chunks: they are compared a few times, not once for each blank."""
    blanks, parts = " " * 1_000_000, ChunkParts()
    content = [{"type": "chunk", "text": blanks + "a" + blanks} for _ in range(3)]
    rendered = "".join(part["text"] for part in parts.take_from_content(content, "content"))
    plain = "a" + (2 * blanks + "a") + (2 * blanks + after)
    started = time.monotonic()
    with pytest.raises(ValueError, match="alters") if refused else contextlib.nullcontext():
        Rendering(SegmentTokenizer(byte_level()), parts).fit([rendered], [plain])
    assert time.monotonic() - started < 20

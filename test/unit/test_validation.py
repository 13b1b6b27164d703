"""The one error of pydantic's that a client is told."""

import time

import pydantic
import pytest

from sglang_lazy.port.serving.chat import ChatRequest
from sglang_lazy.port.serving.completions import CompletionsRequest
from sglang_lazy.serving.validation import the_one, told

pytestmark = pytest.mark.usefixtures("http_process")

USER = {"role": "user", "content": "Who?"}


def chat(*messages, **fields):
    return ChatRequest, {"model": "m", "messages": list(messages), **fields}


def part(**content):
    return chat(USER, {"role": "user", "content": [{"type": "text", "text": "x"}, content]})


CASES = {
    "a number": (*chat(USER, max_tokens="many"), "max_tokens: Input should be a valid integer, unable to parse"),
    "a role": (*chat({**USER, "role": "usr"}), "messages[0].role: 'role' must be one of 'system', 'assistant'"),
    "no content": (*chat({"role": "user"}), "messages[0].content: Field required"),
    "no text": (*part(type="text"), "messages[1].content[1].text: Field required"),
    "no such part": (*part(type="chonk"), "messages[1].content[1].type: "),
    "an image": (*part(type="image_url", image_url=3), "messages[1].content[1].image_url: Input should be an object"),
    "a list": (*chat({**USER, "content": 3}), "messages[0].content: Input should be a valid string or a valid list"),
    "no messages": (ChatRequest, {"model": "m"}, "messages: Input should be a valid list"),
    "a tool": (*chat(USER, tools=[{"type": "function", "function": {}}]), "tools[0].function.name: Field required"),
    "chunks": (
        CompletionsRequest,
        {"prompt": ["x", {"type": "chunk", "text": "x"}]},
        "prompt[1]: a prompt with chunks",
    ),
    "a long text": (CompletionsRequest, {"prompt": "x", "n": "9" * 99 + "x"}, "n: Input should be a valid integer"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_that_matters(case):
    model, body, expected = CASES[case]
    with pytest.raises(pydantic.ValidationError) as refused:
        model.model_validate(body)
    message = told(refused.value)
    assert message.startswith(expected) and len(message) < 250 and "\n" not in message
    assert ("or 'chunk', got 'chonk'" in message) == (case == "no such part")
    assert not any(inner in message for inner in ("Param", "union", "function-", "http", "9999"))


def test_other_errors_are_told_as_they_are():
    assert told(ValueError("too long")) == "too long"


def test_many_errors_take_no_longer():
    """As of a batch with a hundred thousand prompts of a wrong type: the event loop waits for this."""
    locations = (("body", "text", "list[str]", index) for index in range(100_000))
    errors = [{"type": "x", "loc": location, "msg": "Input should be a text"} for location in locations]
    start = time.thread_time()
    assert the_one(errors) == "text[0]: Input should be a text"
    assert time.thread_time() - start < 0.5

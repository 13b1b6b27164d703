"""Haystack: tool results are chunks, recognised by their role."""

from documents import QUESTION, orders, server_url
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, ToolCall
from haystack.utils import Secret

generator = OpenAIChatGenerator(
    api_base_url=f"{server_url(__doc__)}/v1",
    api_key=Secret.from_token("none"),
    model="default",
    generation_kwargs={"temperature": 0, "max_tokens": 16, "extra_body": {"chunk_roles": ["tool"]}},
)
for order in orders():
    calls = [ToolCall("search", {"number": number}, id=f"call-{number}") for number in range(len(order))]
    results = [ChatMessage.from_tool(text, origin=call) for text, call in zip(order, calls, strict=True)]
    question = ChatMessage.from_user(QUESTION)
    (reply,) = generator.run([question, ChatMessage.from_assistant(tool_calls=calls), *results])["replies"]
    print(repr(reply.text))
    details = reply.meta["usage"]["prompt_tokens_details"]  # None if nothing was cached
    print("cached tokens:", details["cached_tokens"] if details else 0)

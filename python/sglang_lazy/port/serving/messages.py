"""Chunks in SGLang's Anthropic Messages API: the request model, and its conversion to a chat."""

import copy
from collections.abc import Callable
from typing import Any

from pydantic import ModelWrapValidatorHandler, model_validator
from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest

from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.serving.chat import ChatRequest, MessagesWithChunks
from sglang_lazy.serving.blocks import BLOCKS
from sglang_lazy.serving.chat import ChunkParts
from sglang_lazy.serving.malformed import reading
from sglang_lazy.serving.threads import Outcome

HOOKS = Hooks()


class MessagesRequest(MessagesWithChunks, AnthropicMessagesRequest):
    """SGLang's request to `/v1/messages`, in which documents, search results and chunk parts are chunks."""

    cache_salt: str | None = None

    blocks = BLOCKS

    @classmethod
    def take_chunks(cls, data: dict[str, Any], chunk_parts: ChunkParts) -> dict[str, Any]:
        data = super().take_chunks(data, chunk_parts)
        if "system" in data:
            data["system"] = chunk_parts.take_from_content(data["system"], "system", "system")
        return data


class CountRequest(AnthropicCountTokensRequest):
    """SGLang's request to `/v1/messages/count_tokens`, refused with a 400 if SGLang fails to read it."""

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, data: Any, handler: ModelWrapValidatorHandler) -> "CountRequest":
        with reading():
            return handler(data)


class Refused(BaseException):
    """A request is invalid. Not an Exception, since SGLang answers those of the conversion with a 500."""


def converting_ahead(serving: Any, request: Any, raw_request: Any) -> Any:
    """A copy of SGLang's object that serves messages, which has converted this request."""
    view, chat = copy.copy(serving), copy.copy(serving.openai_serving_chat)
    view._convert_to_chat_completion_request = converted = Outcome(serving._convert_to_chat_completion_request, request)
    chat._convert_to_internal_request = Outcome(
        lambda: serving.openai_serving_chat._convert_to_internal_request(converted(), raw_request)
    )
    view.openai_serving_chat = chat
    return view


@HOOKS.on("sglang.srt.entrypoints.anthropic.serving.AnthropicServing").feature(
    "_convert_to_chat_completion_request", "AROUND", "Anthropic messages with chunks"
)
def convert_messages(convert: Callable, serving: Any, request: Any) -> Any:
    """Pass on the request's chunks and salt."""
    chat = convert(serving, request)
    if not isinstance(request, MessagesRequest):  # only its tokens are counted
        return chat
    chat.cache_salt = request.cache_salt
    # Without validation, which might mistake fields that SGLang has set for the user's.
    ours = ChatRequest.model_construct(chat.model_fields_set, **vars(chat), link=request.link)
    ours._chunk_parts, ours._refusal = request._chunk_parts, Refused
    return ours

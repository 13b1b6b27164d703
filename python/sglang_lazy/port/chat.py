"""Chunk parts in SGLang's OpenAI chat: the request model, and its conversion to SGLang's internal request."""

import copy
from collections.abc import Callable
from typing import Any

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_lazy.serving.chat import ChunkParts, PlaceholderTokenizer, fill_placeholders
from sglang_lazy.serving.requests import (
    check_cache_salt,
    choose_link,
    refuse_salt,
    segment_tokenizer,
    with_layout,
    with_trained_tokens,
)


class ChatRequest(ChatCompletionRequest):
    """SGLang's chat request with chunk parts and their link."""

    link: str | None = None
    _chunk_parts: ChunkParts = PrivateAttr(default_factory=ChunkParts)
    _given: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _take_chunk_parts(cls, data: Any, handler: ModelWrapValidatorHandler) -> "ChatRequest":
        chunk_parts = ChunkParts()
        given: frozenset[str] = frozenset()
        if isinstance(data, dict):
            given = frozenset(data)
            data = {**data, "messages": chunk_parts.take_from(data.get("messages"))}
        request = handler(data)
        request._chunk_parts, request._given = chunk_parts, given
        return request

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunk_parts.parts)


class _View:
    """`target` with the given attributes replaced."""

    def __init__(self, target: Any, **replaced: Any):
        self.__dict__.update(replaced, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def convert_request(convert: Callable, serving: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
    """Around `OpenAIServingChat._convert_to_internal_request`: render with placeholders, then put the chunks in.

    SGLang's conversion runs on a copy of `serving` whose tokenizer keeps the placeholders apart.
    """
    if not isinstance(request, ChatRequest):
        return convert(serving, request, raw_request)
    if "segments" in request._given:
        raise ValueError(
            "segments are for /generate and /v1/completions: in a chat, chunks are content parts "
            '{"type": "chunk", "text": "..."}'
        )
    if not request.has_chunks:
        if request.link is not None:
            raise ValueError("link needs a prompt with chunk parts")
        return convert(serving, request, raw_request)
    manager, chunk_parts = serving.tokenizer_manager, request._chunk_parts
    _check(manager, request)
    chunks = chunk_parts.parse(manager.model_config.vocab_size)
    tokenizer = segment_tokenizer(manager)
    view = copy.copy(serving)
    view.tokenizer_manager = _View(manager, tokenizer=PlaceholderTokenizer(tokenizer, chunk_parts))
    adapted, request = convert(view, request, raw_request)
    link = choose_link(request.link)
    prompt = fill_placeholders(adapted.input_ids, tokenizer.tokens(chunks), chunk_parts.names)
    prompt = with_trained_tokens(manager, prompt, link)
    adapted.input_ids = prompt.input_ids
    adapted.extra_key = request.extra_key  # the cache salt travels in the layout, as from every surface
    layout = prompt.layout(link, check_cache_salt(request.cache_salt))
    adapted.sampling_params = with_layout(adapted.sampling_params, layout, manager)
    return adapted, request


def _check(manager: Any, request: ChatRequest) -> None:
    refuse_salt(request._given)
    if manager.tokenizer is None:
        raise ValueError("chunk parts need a tokenizer, and this server has none (--skip-tokenizer-init)")
    if manager.model_config.is_multimodal:
        raise ValueError("chunk parts are not supported on multimodal models")
    if request.input_ids is not None:
        raise ValueError("chunk parts cannot be combined with input_ids, which replace the messages")
    check_cache_salt(request.cache_salt)

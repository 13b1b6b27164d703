"""Chunks in SGLang's OpenAI chat API, and code shared with the Responses and Messages APIs."""

import copy
from collections.abc import Callable
from typing import Any

from pydantic import PrivateAttr
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_lazy.core.overlay import Overlay
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.serving import frontend
from sglang_lazy.serving import chat_requests
from sglang_lazy.serving.chat import ChunkParts, PlaceholderTokenizer
from sglang_lazy.serving.chat_requests import check_chunks, put_chunks, refuse_media, with_texts
from sglang_lazy.serving.malformed import reading
from sglang_lazy.serving.prompts import Prompts
from sglang_lazy.serving.rendering import RecordingTokenizer, Rendering
from sglang_lazy.serving.salts import check_cache_salt

HOOKS = Hooks()


class MessagesWithChunks(chat_requests.MessagesWithChunks):
    """A request to this HTTP process."""

    @classmethod
    def prompts(cls) -> Prompts:
        return frontend.current().prompts


class ChatRequest(MessagesWithChunks, ChatCompletionRequest):
    """SGLang's chat request with chunk parts and their link."""

    _refusal: type[BaseException] = PrivateAttr(default=ValueError)


def with_placeholders(serving: Any, chunk_parts: ChunkParts) -> Any:
    """A copy of `serving` whose tokenizer keeps the placeholders of `chunk_parts` separate.

    It renders each conversation a second time with the chunks' own texts, to see what the template makes of them.
    The model counts as text-only: for multimodal ones SGLang would decode the prompt to find images.
    """
    tokenizer = frontend.frontend_of(serving.tokenizer_manager).prompts.tokenizer
    placeholders, plain = PlaceholderTokenizer(tokenizer, chunk_parts), RecordingTokenizer(tokenizer.tokenizer)
    rendering = Rendering(tokenizer, chunk_parts)
    view, plain_view = _with_tokenizer(serving, placeholders), _with_tokenizer(serving, plain)

    def rendered_twice(name: str) -> Callable:
        render, render_plain = getattr(view, name), getattr(plain_view, name)

        def render_both(request: ChatCompletionRequest, *args: Any, **kwargs: Any) -> Any:
            result = render(request, *args, **kwargs)
            messages = with_texts(request.messages, rendering)
            render_plain(request.model_copy(update={"messages": messages}), *args, **kwargs)
            rendering.fit(placeholders.texts, plain.texts)
            return result

        return render_both

    for name in ("_apply_jinja_template", "_apply_conversation_template"):
        setattr(view, name, rendered_twice(name))
    return view


def _with_tokenizer(serving: Any, tokenizer: Any) -> Any:
    manager, view = serving.tokenizer_manager, copy.copy(serving)
    model_config = Overlay(manager.model_config, is_multimodal=False)
    view.tokenizer_manager = Overlay(manager, tokenizer=tokenizer, model_config=model_config)
    return view


@HOOKS.on("sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat").feature(
    "_convert_to_internal_request", "AROUND", "chats with chunks"
)
def convert_request(convert: Callable, serving: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
    """Render with placeholders, then insert the chunks."""
    if not isinstance(request, ChatRequest):
        return convert(serving, request, raw_request)
    try:
        with reading():
            return _convert(convert, serving, request, raw_request)
    except ValueError as error:
        raise request._refusal(str(error)) from None


def _convert(convert: Callable, serving: Any, request: ChatRequest, raw_request: Any) -> tuple[Any, Any]:
    request.refuse_unread(request.input_ids, request.chat_template_kwargs)
    if not request.has_chunks:
        request.refuse_without_chunks()
        return convert(serving, request, raw_request)
    prompts, chunk_parts = frontend.frontend_of(serving.tokenizer_manager).prompts, request._chunk_parts
    check_chunks(prompts, chunk_parts)
    check_cache_salt(request.cache_salt)
    adapted, _ = convert(with_placeholders(serving, chunk_parts), request, raw_request)
    refuse_media(adapted, "video", "audio")
    adapted.input_ids, plan = put_chunks(prompts, request.link, request.cache_salt, adapted.input_ids, chunk_parts)
    adapted.extra_key = request.extra_key  # as in all APIs, the layout carries the cache salt
    adapted.sampling_params = prompts.with_plan(adapted.sampling_params, plan)
    return adapted, request

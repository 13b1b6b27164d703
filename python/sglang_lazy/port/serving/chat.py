"""Chunks in SGLang's OpenAI chat API, and code shared with the Responses and Messages APIs."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_lazy.core.labels import Label
from sglang_lazy.core.overlay import Overlay
from sglang_lazy.port.hooks import feature
from sglang_lazy.port.serving import frontend
from sglang_lazy.port.serving.malformed import reading
from sglang_lazy.serving.chat import ChunkParts, PlaceholderTokenizer, fill_placeholders
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.prompts import Prompts
from sglang_lazy.serving.rendering import RecordingTokenizer, Rendering
from sglang_lazy.serving.salts import check_cache_salt
from sglang_lazy.serving.validation import taking_chunks


class MessagesWithChunks(BaseModel):
    """A request with messages whose chunks are taken out before SGLang parses them."""

    link: str | None = None
    chunk_separator: str | None = None
    chunk_roles: list[str] | None = None

    blocks: ClassVar[dict[str, Callable]] = {}
    """Types of content blocks, besides chunk parts, that are chunks in this API, and functions that read their text."""

    _chunk_parts: ChunkParts = PrivateAttr(default_factory=ChunkParts)

    @model_validator(mode="wrap")
    @classmethod
    def _take_chunks(cls, data: Any, handler: ModelWrapValidatorHandler) -> "MessagesWithChunks":
        if not isinstance(data, dict):
            raise ValueError("the body must be an object")
        prompts, separator, roles = frontend.current().prompts, data.get("chunk_separator"), data.get("chunk_roles")
        chunk_parts = ChunkParts(
            prompts.separator(separator if isinstance(separator, str) else None),
            [role for role in roles if isinstance(role, str)] if isinstance(roles, list) else prompts.roles,
            cls.blocks,
            prompts.limit(data.get("link")),
        )
        with taking_chunks(), reading():
            request = handler(cls.take_chunks(data, chunk_parts))
        request._chunk_parts = chunk_parts
        return request

    @classmethod
    def take_chunks(cls, data: dict[str, Any], chunk_parts: ChunkParts) -> dict[str, Any]:
        """A copy of the request's body with placeholders in place of the chunks."""
        return {**data, "messages": chunk_parts.take_from(data.get("messages"))}

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunk_parts.parts)

    def refuse_without_chunks(self) -> None:
        """Raise ValueError for fields that need chunks if there are none."""
        if self.link is not None and not self._chunk_parts.of_text:
            raise ValueError("link needs a prompt with chunk parts")


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
            render_plain(_plain(request, rendering), *args, **kwargs)
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


def _plain(request: ChatCompletionRequest, rendering: Rendering) -> ChatCompletionRequest:
    """A copy of `request` with the chunks' texts in place of their placeholders."""

    def with_texts(content: Any) -> Any:
        if isinstance(content, str):
            return rendering.plain(content)
        if isinstance(content, list):
            return [with_texts(part) for part in content]
        if isinstance(text := getattr(content, "text", None), str):
            return content.model_copy(update={"text": rendering.plain(text)})
        return content

    messages = [message.model_copy(update={"content": with_texts(message.content)}) for message in request.messages]
    return request.model_copy(update={"messages": messages})


def put_chunks(prompts: Prompts, request: Any, rendered: Any, chunk_parts: ChunkParts) -> tuple[list[int], Plan | None]:
    """The token ids and the plan of a prompt rendered with placeholders.

    request: has `link` and `cache_salt`. Raises ValueError for bad chunks, naming the part.
    """
    policy, chunks = prompts.policy(request.link), chunk_parts.parse(prompts.server.vocab_size)
    tokens = prompts.tokenizer.tokens(chunks, request.cache_salt)
    prompt = fill_placeholders(rendered, tokens, chunk_parts.names)
    labels: list[Label | None] = []
    if any(chunk.label for chunk in chunks):
        labels = [chunks[-1 - token].label for token in rendered if token < 0]  # the ids of placeholders
    return prompts.planned(prompt, policy, check_cache_salt(request.cache_salt), labels)


def check_chunks(prompts: Prompts, chunk_parts: ChunkParts) -> None:
    """Raise ValueError for errors that can be found before the template is rendered."""
    if prompts.server.tokenizer is None:
        raise ValueError("chunk parts need a tokenizer, and this server has none (--skip-tokenizer-init)")
    chunk_parts.parse(prompts.server.vocab_size)


def refuse_media(rendered: Any, *kinds: str) -> None:
    """Raise ValueError if a chat with chunk parts also has parts of these kinds, under any policy."""
    for kind in kinds:
        if getattr(rendered, f"{kind}_data", None):
            raise ValueError(f"chunk parts cannot be combined with {kind} parts")


def convert_request(convert: Callable, serving: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
    """Around `OpenAIServingChat._convert_to_internal_request`: render with placeholders, then insert the chunks."""
    if not isinstance(request, ChatRequest):
        return convert(serving, request, raw_request)
    try:
        with reading():
            return _convert(convert, serving, request, raw_request)
    except ValueError as error:
        raise request._refusal(str(error)) from None


def _refuse_unread(request: ChatRequest) -> None:
    """Raise ValueError for what looks like chunks where none are taken."""
    ours = request.has_chunks or request.link is not None
    if request.input_ids is not None and (request.chunk_separator or request.chunk_roles):
        raise ValueError("chunk_separator and chunk_roles divide messages, which input_ids replace")
    if ours and (request.chat_template_kwargs or {}).get("documents"):
        raise ValueError("documents in chat_template_kwargs are text: give them as chunk parts of a message instead")


def _convert(convert: Callable, serving: Any, request: ChatRequest, raw_request: Any) -> tuple[Any, Any]:
    _refuse_unread(request)
    if not request.has_chunks:
        request.refuse_without_chunks()
        return convert(serving, request, raw_request)
    prompts, chunk_parts = frontend.frontend_of(serving.tokenizer_manager).prompts, request._chunk_parts
    check_chunks(prompts, chunk_parts)
    check_cache_salt(request.cache_salt)
    if request.input_ids is not None:
        raise ValueError("chunk parts cannot be combined with input_ids, which replace the messages")
    adapted, _ = convert(with_placeholders(serving, chunk_parts), request, raw_request)
    refuse_media(adapted, "video", "audio")
    adapted.input_ids, plan = put_chunks(prompts, request, adapted.input_ids, chunk_parts)
    adapted.extra_key = request.extra_key  # as in all APIs, the layout carries the cache salt
    adapted.sampling_params = prompts.with_plan(adapted.sampling_params, plan)
    return adapted, request


HOOKS = (
    feature(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        convert_request,
        "AROUND",
        "chats with chunks",
    ),
)

"""OpenAI chat: `{"type": "chunk"}` content parts beside ordinary ones, in any message."""

import copy
import re
import secrets
from collections.abc import Callable
from typing import Any

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_lazy.core.segments import Segment, parse_segment
from sglang_lazy.serving.requests import (
    check_salt,
    choose_link,
    refuse_without_chunks,
    segment_tokenizer,
    with_layout,
)
from sglang_lazy.serving.tokenization import SegmentTokenizer, TokenizedPrompt


class ChunkParts:
    """The chunk parts of one chat request and the placeholders that stand for them while its template is rendered.

    A document never reaches the template. Placeholders hold a nonce drawn for this request, so no text can forge one,
    and nothing but letters, digits and underscores, so templates pass them on unchanged.
    """

    def __init__(self):
        self.parts: list[dict[str, Any]] = []
        self.names: list[str] = []
        self._nonce = secrets.token_hex(16)
        self._pattern = re.compile(f"{self._nonce}_([0-9]+)_")

    def take_from(self, messages: Any) -> Any:
        """A copy of `messages` in which text parts with placeholders replace the chunk parts."""
        if not isinstance(messages, list):
            return messages
        return [self._take_from_message(index, message) for index, message in enumerate(messages)]

    def _take_from_message(self, index: int, message: Any) -> Any:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(content, list) or not any(map(_is_chunk, content)):
            return message
        taken = []
        for position, part in enumerate(content):
            if _is_chunk(part):
                taken.append({"type": "text", "text": f"{self._nonce}_{len(self.parts)}_"})
                self.parts.append(part)
                self.names.append(f"messages[{index}].content[{position}]")
            else:
                taken.append(part)
        return {**message, "content": taken}

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """`text` cut at its placeholders: n + 1 texts, and the indices of the n parts between them."""
        pieces = self._pattern.split(text)
        return pieces[::2], [int(index) for index in pieces[1::2]]

    def parse(self, vocab_size: int) -> list[Segment]:
        """The parts as segments. Raises ValueError, naming the part, on a malformed one."""
        segments = []
        for name, part in zip(self.names, self.parts, strict=True):
            try:
                segments.append(parse_segment(part, vocab_size))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return segments


def _is_chunk(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "chunk"


class ChatRequest(ChatCompletionRequest):
    """SGLang's chat request with chunk parts, their salt and their link."""

    salt: str | None = None
    link: str | None = None
    _chunk_parts: ChunkParts = PrivateAttr(default_factory=ChunkParts)

    @model_validator(mode="wrap")
    @classmethod
    def _take_chunk_parts(cls, data: Any, handler: ModelWrapValidatorHandler) -> "ChatRequest":
        chunk_parts = ChunkParts()
        if isinstance(data, dict):
            data = {**data, "messages": chunk_parts.take_from(data.get("messages"))}
        request = handler(data)
        request._chunk_parts = chunk_parts
        return request

    @property
    def has_chunks(self) -> bool:
        return bool(self._chunk_parts.parts)


class PlaceholderTokenizer:
    """A tokenizer in whose output the id -1 - i stands for chunk part i. All else is the wrapped tokenizer's."""

    def __init__(self, segment_tokenizer: SegmentTokenizer, chunk_parts: ChunkParts):
        self._segment_tokenizer = segment_tokenizer
        self._chunk_parts = chunk_parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._segment_tokenizer.tokenizer, name)

    def encode(self, text: Any, *args, **kwargs) -> list[int]:
        """As the wrapped tokenizer up to the first placeholder; each text after one is tokenized by itself."""
        encode = self._segment_tokenizer.tokenizer.encode
        texts, indices = self._chunk_parts.split(text) if isinstance(text, str) else ([text], [])
        opening = encode(texts[0], *args, **kwargs)
        if not indices:
            return opening
        after = self._segment_tokenizer.after
        ends_here = bool(after) and opening[-len(after) :] == after  # special tokens that belong at the prompt's end
        input_ids = list(opening[: -len(after)] if ends_here else opening)
        for index, tokens in zip(indices, self._segment_tokenizer.encode_later(texts[1:]), strict=True):
            input_ids.append(-1 - index)
            input_ids.extend(tokens)
        return input_ids + after if ends_here else input_ids


class _View:
    """`target` with the given attributes replaced."""

    def __init__(self, target: Any, **replaced: Any):
        self.__dict__.update(replaced, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def convert_request(convert: Callable, serving: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
    """Hook around `OpenAIServingChat._convert_to_internal_request`: render with placeholders, then put chunks in.

    Runs the stock conversion on a copy of `serving` whose tokenizer keeps the placeholders apart.
    """
    if not isinstance(request, ChatRequest):
        return convert(serving, request, raw_request)
    if not request.has_chunks:
        refuse_without_chunks(request.salt, request.link, "chunk parts")
        return convert(serving, request, raw_request)
    manager, chunk_parts = serving.tokenizer_manager, request._chunk_parts
    _check(manager, request)
    chunks = chunk_parts.parse(manager.model_config.vocab_size)
    tokenizer = segment_tokenizer(manager)
    view = copy.copy(serving)
    view.tokenizer_manager = _View(manager, tokenizer=PlaceholderTokenizer(tokenizer, chunk_parts))
    adapted, request = convert(view, request, raw_request)
    prompt = fill_placeholders(adapted.input_ids, tokenizer.tokens(chunks), chunk_parts.names)
    adapted.input_ids = prompt.input_ids
    layout = prompt.layout(choose_link(request.link), check_salt(request.salt))
    adapted.sampling_params = with_layout(adapted.sampling_params, layout, manager)
    return adapted, request


def _check(manager: Any, request: ChatRequest) -> None:
    if manager.tokenizer is None:
        raise ValueError("chunk parts need a tokenizer, and this server has none (--skip-tokenizer-init)")
    if manager.model_config.is_multimodal:
        raise ValueError("chunk parts are not supported on multimodal models")
    if request.input_ids is not None:
        raise ValueError("chunk parts cannot be combined with input_ids, which stand in for the messages")


def fill_placeholders(rendered: Any, chunk_tokens: list[list[int]], names: list[str]) -> TokenizedPrompt:
    """The prompt in which the tokens of chunk i replace the id -1 - i in `rendered`.

    Raises ValueError for a chunk without tokens and for one that the chat template left out.
    """
    if not isinstance(rendered, list):
        raise ValueError("this model's chat encoding does not support chunk parts")
    missing = set(range(len(names))).difference(-1 - token for token in rendered if token < 0)
    if missing:
        raise ValueError(f"{names[min(missing)]}: the model's chat template leaves this chunk out of the prompt")
    input_ids, chunks = [], []
    for token in rendered:
        if token >= 0:
            input_ids.append(token)
            continue
        tokens = chunk_tokens[-1 - token]
        if not tokens:
            raise ValueError(f"{names[-1 - token]}: the text of a chunk segment gives no tokens")
        chunks.append((len(input_ids), len(input_ids) + len(tokens)))
        input_ids.extend(tokens)
    return TokenizedPrompt(input_ids, tuple(chunks))

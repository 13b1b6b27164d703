"""Chunks in the messages of all chat APIs: content parts of type "chunk", and text that is marked as chunks."""

import dataclasses
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from sglang_lazy.core.overlay import Overlay
from sglang_lazy.core.segments import NO_LIMIT, ChunkLimit, Segment, parse_segment
from sglang_lazy.serving.text import divide
from sglang_lazy.serving.tokenization import SegmentTokenizer, TokenizedPrompt

_TEXTS = ("text", "input_text", "output_text")
"""Types of text parts: the first in every API, the others in the Responses API."""


class ChunkParts:
    """The chunks in the messages of one request, and the placeholders that replace them while its template is rendered.

    A placeholder holds a nonce drawn for this request, so no text can forge one, and only letters, digits and
    underscores, so templates pass it on unchanged. What they would do to the chunks themselves is for `Rendering`.

    separator: text between the two of a pair is a chunk; empty for no separator.
    roles: in messages of these roles, all text is a chunk; separators divide it into several.
    rendered: by index, the texts of chunks that the template alters.
    blocks: other types of content parts that are chunks, and the functions that return their text.
    limit: on the number of chunks. Taking more raises TooManyChunks.
    """

    def __init__(
        self,
        separator: str = "",
        roles: Collection[str] = (),
        blocks: Mapping[str, Callable[[Mapping[str, Any]], str]] | None = None,
        limit: ChunkLimit = NO_LIMIT,
    ):
        self.parts: list[Mapping[str, Any] | Segment] = []
        self.names: list[str] = []
        self.rendered: Mapping[int, str] = {}
        self.limit = limit
        self._separator, self._roles, self._blocks = separator, frozenset(roles), blocks or {}
        self._num_separators = 0
        self._nonces = [secrets.token_hex(16)]
        self._indices: dict[str, int] = {}

    @property
    def of_text(self) -> bool:
        """Whether text may be a chunk. Then a request may name a link before its conversation has chunks."""
        return bool(self._separator or self._roles)

    def take_from(self, messages: Any, field: str = "messages") -> Any:
        """A copy of `messages` in which placeholders replace the chunks.  field: their name in the request's body."""
        if not isinstance(messages, list):
            return messages
        return [self._take_from_message(f"{field}[{index}]", message) for index, message in enumerate(messages)]

    def _take_from_message(self, name: str, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        if message.get("type") == "function_call_output":  # the Responses API's message of role tool
            return {**message, "output": self.take_from_content(message.get("output"), f"{name}.output", "tool")}
        if "content" not in message:
            return message
        return {
            **message,
            "content": self.take_from_content(message["content"], f"{name}.content", message.get("role")),
        }

    def take_from_content(self, content: Any, name: str, role: Any = None) -> Any:
        """A copy of one message's content, a text or a list of parts, in which placeholders replace the chunks."""
        if isinstance(content, str):
            return self._take_from_text(content, name, role)
        if not isinstance(content, list):
            return content
        return [self._take_from_part(part, f"{name}[{index}]", role) for index, part in enumerate(content)]

    def _take_from_part(self, part: Any, name: str, role: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):  # for SGLang to refuse
            return part
        if kind == "chunk":
            # Anthropic's `cache_control` means nothing here.
            own = {key: value for key, value in part.items() if key != "cache_control"}
            return {"type": "text", "text": self._take(own, name)}
        if kind in self._blocks:
            return {"type": "text", "text": self._take({"type": "chunk", "text": self._read(part, name)}, name)}
        if kind in _TEXTS and isinstance(part.get("text"), str):
            return {**part, "text": self._take_from_text(part["text"], name, role)}
        if kind == "tool_result":  # the Messages API's message of role tool
            return {**part, "content": self.take_from_content(part.get("content"), f"{name}.content", "tool")}
        return part

    def _read(self, part: Mapping[str, Any], name: str) -> str:
        try:
            return self._blocks[part["type"]](part)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _take_from_text(self, text: str, name: str, role: Any) -> str:
        if self._separator:
            self._num_separators += text.count(self._separator)
            self.limit.check_separators(self._num_separators)
        pieces = self._divide(text, name, isinstance(role, str) and role in self._roles)
        return "".join(
            [self._take({"type": "chunk", "text": piece}, name) if chunk else piece for piece, chunk in pieces]
        )

    def _divide(self, text: str, name: str, all_chunks: bool) -> Sequence[tuple[str, bool]]:
        if all_chunks or not self._separator:
            pieces = text.split(self._separator) if self._separator else [text]
            return [(piece, all_chunks and bool(piece.strip())) for piece in pieces]
        try:
            return divide(text, self._separator)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _take(self, part: Mapping[str, Any], name: str) -> str:
        self.limit.check(len(self.parts) + 1)
        placeholder = f"{self._nonces[-1]}_{len(self.parts)}_"
        self._indices[placeholder] = len(self.parts)
        self.parts.append(part)
        self.names.append(name)
        return placeholder

    def continuing(self, earlier: "ChunkParts") -> "ChunkParts":
        """The parts of an earlier request, which this one continues, followed by these. Raises TooManyChunks."""
        self.limit.check(len(earlier.parts) + len(self.parts))
        both = ChunkParts(limit=self.limit)
        both.parts, both.names = earlier.parts + self.parts, earlier.names + self.names
        later = {placeholder: len(earlier.parts) + index for placeholder, index in self._indices.items()}
        both._indices, both._nonces = {**earlier._indices, **later}, earlier._nonces + self._nonces
        return both

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """`text` split at its placeholders: n + 1 texts, and the indices of the n parts between them."""
        if not self._indices:
            return [text], []
        # One generic pattern: compiling hundreds of placeholders would take longer than serving the prompt.
        pieces = re.split(rf"((?:{'|'.join(self._nonces)})_\d+_)", text)
        return pieces[::2], [self._indices[placeholder] for placeholder in pieces[1::2]]

    def parse(self, vocab_size: int) -> list[Segment]:
        """The parts as segments. Raises ValueError, naming the part, on a malformed one."""
        segments = []
        for name, part in zip(self.names, self.parts, strict=True):
            try:
                segments.append(parse_segment(part, vocab_size, by_id=True))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        for index, text in self.rendered.items():
            segments[index] = dataclasses.replace(segments[index], text=text, input_ids=None)
        return segments


class History(list):
    """A conversation with placeholders, as SGLang stores it for the next turn, and the chunks in their place."""

    def __init__(self, items: Iterable, chunk_parts: ChunkParts):
        super().__init__(items)
        self.chunk_parts = chunk_parts

    def __add__(self, answer: list) -> "History":
        return History([*self, *answer], self.chunk_parts)


class PlaceholderTokenizer(Overlay):
    """A tokenizer that encodes the placeholder of chunk part i as the id -1 - i; otherwise the wrapped tokenizer."""

    def __init__(self, segment_tokenizer: SegmentTokenizer, chunk_parts: ChunkParts):
        super().__init__(segment_tokenizer.tokenizer)
        self._segment_tokenizer = segment_tokenizer
        self._chunk_parts = chunk_parts
        self.texts: list[str] = []
        """What it has encoded."""

    def encode(self, text: Any, *args, **kwargs) -> list[int]:
        """As the wrapped tokenizer up to the first placeholder; each text after one is encoded separately."""
        self.texts.append(text)
        encode = self._segment_tokenizer.tokenizer.encode
        texts, indices = self._chunk_parts.split(text) if isinstance(text, str) else ([text], [])
        opening = encode(texts[0], *args, **kwargs)
        if not indices:
            return opening
        after = self._segment_tokenizer.after if kwargs.get("add_special_tokens", True) else []
        ends_here = bool(after) and opening[-len(after) :] == after  # special tokens at the end of the prompt
        input_ids = list(opening[: -len(after)] if ends_here else opening)
        for index, tokens in zip(indices, self._segment_tokenizer.encode_later(texts[1:]), strict=True):
            input_ids.append(-1 - index)
            input_ids.extend(tokens)
        return input_ids + after if ends_here else input_ids


def fill_placeholders(rendered: Any, chunk_tokens: Sequence[Sequence[int]], names: list[str]) -> TokenizedPrompt:
    """The prompt in which the tokens of chunk i replace the id -1 - i in `rendered`.

    Raises ValueError for a chunk without tokens, and for one that the chat template left out.
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

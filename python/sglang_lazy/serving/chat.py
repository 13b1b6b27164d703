"""OpenAI chat: `{"type": "chunk"}` content parts beside ordinary ones, in any message."""

import re
import secrets
from collections.abc import Sequence
from typing import Any

from sglang_lazy.core.segments import Segment, parse_segment
from sglang_lazy.serving.tokenization import SegmentTokenizer, TokenizedPrompt


class ChunkParts:
    """The chunk parts of one chat request, and the placeholders that replace them while its template is rendered.

    Documents never reach the template. A placeholder holds a nonce drawn for this request, so no text can forge one,
    and only letters, digits and underscores, so templates pass it on unchanged.
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


class PlaceholderTokenizer:
    """A tokenizer that encodes the placeholder of chunk part i as the id -1 - i; otherwise the wrapped tokenizer."""

    def __init__(self, segment_tokenizer: SegmentTokenizer, chunk_parts: ChunkParts):
        self._segment_tokenizer = segment_tokenizer
        self._chunk_parts = chunk_parts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._segment_tokenizer.tokenizer, name)

    def encode(self, text: Any, *args, **kwargs) -> list[int]:
        """As the wrapped tokenizer up to the first placeholder; each text after one is encoded separately."""
        encode = self._segment_tokenizer.tokenizer.encode
        texts, indices = self._chunk_parts.split(text) if isinstance(text, str) else ([text], [])
        opening = encode(texts[0], *args, **kwargs)
        if not indices:
            return opening
        after = self._segment_tokenizer.after
        ends_here = bool(after) and opening[-len(after) :] == after  # special tokens of the prompt's end
        input_ids = list(opening[: -len(after)] if ends_here else opening)
        for index, tokens in zip(indices, self._segment_tokenizer.encode_later(texts[1:]), strict=True):
            input_ids.append(-1 - index)
            input_ids.extend(tokens)
        return input_ids + after if ends_here else input_ids


def fill_placeholders(rendered: Any, chunk_tokens: Sequence[Sequence[int]], names: list[str]) -> TokenizedPrompt:
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

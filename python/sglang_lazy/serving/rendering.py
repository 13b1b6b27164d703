"""What a chat template makes of chunks: it also renders the whole text, and the chunks must spell the same prompt.

A template may do anything with the content of a message: strip it, write it as JSON, or look for a word in it. Chunks
are taken out before, so nothing of this would happen to them. Rendering their text as well shows what would.
"""

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from sglang_lazy.core.overlay import Overlay
from sglang_lazy.core.segments import Segment, parse_segment
from sglang_lazy.serving.chat import ChunkParts
from sglang_lazy.serving.tokenization import SegmentTokenizer

_ALTERABLE = ' "It\'s" <a> & \\b\\ \n\tÄnd ÖTHER\n '
"""What filters change: quotes, markup, backslashes, blanks, letters of both cases and outside ASCII."""
_ENDS = 32
"""How many tokens at each end of a chunk are decoded: templates look at the ends of a text."""
_SHOWN = 30

_ESCAPES: Sequence[Callable[[str], str]] = (
    str,
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
_STRIPS: Sequence[Callable[[str], str]] = (
    str,
    lambda text: text.lstrip("\n"),
    lambda text: text.rstrip("\n"),
    str.lstrip,
    str.rstrip,
    lambda text: text.strip("\n"),
    str.strip,
)
"""From those that keep most to those that keep least, so that blanks between two chunks are found to be theirs."""


class RecordingTokenizer(Overlay):
    """A tokenizer that keeps the texts it should encode; otherwise the wrapped one."""

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        self.texts: list[str] = []

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        self.texts.append(text)
        return []


class Rendering:
    """The chunks of one request, and the text that stands in for each of them in a plain rendering.

    That is the chunk's own text. A chunk given by its tokens has only its ends decoded, and between them characters
    that show what the template does.
    """

    def __init__(self, tokenizer: SegmentTokenizer, chunk_parts: ChunkParts):
        self._chunk_parts = chunk_parts
        self._chunks = [parse_segment(part) for part in chunk_parts.parts]
        self._texts = [stand_in(tokenizer, chunk) if chunk.text is None else chunk.text for chunk in self._chunks]

    def plain(self, text: str) -> str:
        """`text` with the chunks' texts in place of their placeholders."""
        texts, indices = self._chunk_parts.split(text)
        if not indices:
            return text
        return texts[0] + "".join([self._texts[i] + after for i, after in zip(indices, texts[1:], strict=True)])

    def fit(self, rendered: Sequence[str], plain: Sequence[str]) -> None:
        """Give the chunks the texts that the template gives them, so that they spell the plain rendering.

        rendered, plain: the texts that the template gave, with placeholders and without.
        Raises ValueError, naming the chunk, if they cannot.
        """
        found: dict[int, str] = {}
        if [self.plain(text) for text in rendered] != plain:
            for with_placeholders, text in itertools.zip_longest(rendered, plain, fillvalue=""):
                self._fit(with_placeholders, text, found)
        self._chunk_parts.rendered = {index: text for index, text in found.items() if text != self._texts[index]}

    def _fit(self, rendered: str, plain: str, found: dict[int, str]) -> None:
        texts, indices = self._chunk_parts.split(rendered)
        if not indices:
            name = self._chunk_parts.names[0]
            raise ValueError(
                f"{name}: the model's chat template alters this chunk, or the text around it. Send it as text"
            )
        place = len(texts[0])
        if not plain.startswith(texts[0]):
            self._refuse(indices[0], texts[0], plain)
        for number, (index, after) in enumerate(zip(indices, texts[1:], strict=True), 1):
            for text in self._candidates(index, found):
                end = place + len(text)
                fits = plain.startswith(text, place) and plain.startswith(after, end)
                if fits and (number < len(indices) or end + len(after) == len(plain)):
                    break
            else:
                self._refuse(index, self._texts[index] + after, plain[place:])
            found[index] = text
            place = end + len(after)

    def _candidates(self, index: int, found: dict[int, str]) -> Iterator[str]:
        """What the template may have made of a chunk: the same wherever it stands, and never nothing."""
        text = self._texts[index]
        if index in found or self._chunks[index].text is None:
            yield found.get(index, text)
        else:
            yield from filter(None, (escape(strip(text)) for escape in _ESCAPES for strip in _STRIPS))

    def _refuse(self, index: int, expected: str, found: str) -> NoReturn:
        same = len(os.path.commonprefix([expected, found]))
        start = max(0, same - _SHOWN // 2)
        raise ValueError(
            f"{self._chunk_parts.names[index]}: the model's chat template alters this chunk, or the text around it: "
            f"{expected[start : start + _SHOWN]!r} becomes {found[start : start + _SHOWN]!r}. Send it as text"
        )


def stand_in(tokenizer: SegmentTokenizer, chunk: Segment) -> str:
    """A text for a chunk that is given by its tokens."""
    ids = chunk.input_ids or ()
    if len(ids) <= 2 * _ENDS:
        return tokenizer.decode_later(list(ids))
    return tokenizer.decode_later(list(ids[:_ENDS])) + _ALTERABLE + tokenizer.decode_later(list(ids[-_ENDS:]))

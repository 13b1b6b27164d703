"""Prompts as segments, and the layout of chunks that travels with a request."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sglang_lazy.core.labels import LABEL_KEYS, Label, parse_label

LAYOUT_PARAM = "sglang_lazy"
"""Key in `SamplingParams.custom_params` under which a request's packed layout travels to the scheduler."""

LAYOUT_VERSION = 1


_KINDS = ("text", "chunk")
_KEYS = frozenset(("type", "text", "input_ids"))
_CHUNK_KEYS = _KEYS | LABEL_KEYS


@dataclasses.dataclass(frozen=True)
class Segment:
    """One element of a prompt, given as text or as token ids (exactly one of them, never empty).

    label: a chunk's, None without one.
    """

    is_chunk: bool
    text: str | None = None
    input_ids: Sequence[int] | None = None
    label: Label | None = None


class TooManyChunks(ValueError):
    """A prompt has more chunks than are allowed."""


class ChunkLimit(NamedTuple):
    """The most chunks of one prompt, and what sets this limit. Whatever takes chunks counts them, and stops there."""

    most: float = math.inf
    source: str = "--lazy-max-chunks"

    def check(self, number: int) -> None:
        """Raise TooManyChunks if `number` chunks exceed the limit."""
        if number > self.most:
            raise TooManyChunks(f"the prompt has more than the {self.most} chunks that are allowed ({self.source})")

    def check_separators(self, number: int) -> None:
        """The same for the separators around chunks: two for each, and as many again around blanks."""
        if number > 4 * self.most:
            raise TooManyChunks(
                f"the prompt has {number} chunk separators, but at most {self.most} chunks are allowed ({self.source})"
            )


NO_LIMIT = ChunkLimit()


def parse_segment(value: Any, vocab_size: int | None = None, *, by_id: bool = False) -> Segment:
    """The segment in `value`: a string (text), `sglang_lazy.chunk(…)`, a `Segment`, or a dict as in a JSON request.

    by_id: whether errors tell that a chunk may be named by id, which its tokens replace before they come here.
    Raises ValueError for anything else: an unknown type or key, empty or non-string text, both or neither of text and
    input_ids, token ids that are not integers or lie outside the vocabulary, a bad label.
    """
    if isinstance(value, Segment):
        return value
    if isinstance(value, str):
        value = {"type": "text", "text": value}
    elif hasattr(value, "to_segment"):
        value = value.to_segment()
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a string, a chunk or an object with a type, got {type(value).__name__}")
    kind = value.get("type")
    if kind not in _KINDS:
        raise ValueError(f"unknown segment type {kind!r}, expected one of {', '.join(map(repr, _KINDS))}")
    unknown = sorted(map(str, value.keys() - (_CHUNK_KEYS if kind == "chunk" else _KEYS)))
    text, input_ids = value.get("text"), value.get("input_ids")
    if unknown or (text is None) == (input_ids is None):
        contents = ("text, input_ids", "id") if by_id and kind == "chunk" else ("text", "input_ids")
        if unknown:
            expected = " or ".join(contents)
            raise ValueError(f"unknown key {unknown[0]!r} in a {kind} segment, expected type and {expected}")
        raise ValueError(f"a {kind} segment needs exactly one of {' and '.join(contents)}")
    if text is not None:
        _check_text(kind, text)
    else:
        _check_input_ids(kind, input_ids, vocab_size)
    label = parse_label(value.get("name"), value.get("metadata")) if len(value) > 2 else None
    return Segment(kind == "chunk", text, input_ids, label)


def _check_text(kind: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"the text of a {kind} segment must be a string, got {type(text).__name__}")
    if not text:
        raise ValueError(f"the text of a {kind} segment is empty")
    text.encode()  # raises for half of a surrogate pair, which tokenizers do not take


def _check_input_ids(kind: str, input_ids: Any, vocab_size: int | None) -> None:
    if not isinstance(input_ids, list | tuple) or list(map(type, input_ids)).count(int) < len(input_ids):
        raise ValueError(f"the input_ids of a {kind} segment must be a list of integers")
    if not input_ids:
        raise ValueError(f"the input_ids of a {kind} segment are empty")
    if min(input_ids) < 0 or (vocab_size is not None and max(input_ids) >= vocab_size):
        bad = next(token for token in input_ids if token < 0 or (vocab_size is not None and token >= vocab_size))
        raise ValueError(f"token id {bad} in a {kind} segment is outside the vocabulary of {vocab_size} tokens")


def parse_segments(
    values: Any, vocab_size: int | None = None, limit: ChunkLimit = NO_LIMIT, *, by_id: bool = False
) -> list[Segment]:
    """The segments of one prompt.

    Raises ValueError as `parse_segment` does, with the index, and for an empty list; TooManyChunks beyond `limit`.
    """
    if not isinstance(values, list | tuple):
        raise ValueError(f"segments must be a list, got {type(values).__name__}")
    if not values:
        raise ValueError("segments is empty: a prompt needs at least one segment")
    segments: list[Segment] = []
    num_chunks = 0
    for index, value in enumerate(values):
        try:
            segments.append(parse_segment(value, vocab_size, by_id=by_id))
        except ValueError as error:
            raise ValueError(f"segments[{index}]: {error}") from None
        num_chunks += segments[-1].is_chunk
        limit.check(num_chunks)
    return segments


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """Where the chunks of a prompt are, and how to use them.

    chunks: (start, end) token positions of each chunk in the concatenated prompt: ordered, disjoint, non-empty. There
        are none only if `link` is full and the layout serves to carry the cache salt.
    cache_salt: namespace of the request's KV, None for the shared one.
    link: the policy.
    ahead: whether its chunks are computed ahead of use: prompts that somebody waits for go first.
    """

    chunks: tuple[tuple[int, int], ...]
    cache_salt: str | None = None
    link: str = "block"
    ahead: bool = False

    def pack(self) -> str:
        """Serialize as JSON, which every transport between SGLang's processes preserves."""
        fields = {"v": LAYOUT_VERSION, "chunks": self.chunks, "cache_salt": self.cache_salt, "link": self.link}
        if self.ahead:
            fields["ahead"] = True
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def unpack(cls, packed: str, prompt_len: int) -> "PromptLayout":
        """Parse `packed`, without checking that its policy exists.

        Raises ValueError if it is malformed, of another version, or does not fit a prompt of `prompt_len` tokens.
        """
        try:
            fields = json.loads(packed)
            version = fields["v"]
            if version == LAYOUT_VERSION:
                chunks = tuple((int(start), int(end)) for start, end in fields["chunks"])
                layout = cls(chunks, fields["cache_salt"], fields["link"], bool(fields.get("ahead")))
        except (TypeError, KeyError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"malformed prompt layout: {packed!r:.200}") from error
        if version != LAYOUT_VERSION:
            raise ValueError(f"prompt layout of version {version!r:.20}, but this is version {LAYOUT_VERSION}")
        if layout.cache_salt is not None and not isinstance(layout.cache_salt, str):
            raise ValueError(f"cache_salt must be a string or null, got {type(layout.cache_salt).__name__}")
        if not isinstance(layout.link, str):
            raise ValueError(f"link must be a string, got {type(layout.link).__name__}")
        position = 0
        for start, end in layout.chunks:
            if not position <= start < end <= prompt_len:
                raise ValueError(
                    f"chunk [{start}, {end}) is empty, out of order or beyond the prompt's {prompt_len} tokens"
                )
            position = end
        return layout

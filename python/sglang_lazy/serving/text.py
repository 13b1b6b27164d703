"""Chunks in plain text, for clients that cannot send segments: the text between the two separators of a pair."""

import itertools
from typing import Any

from sglang_lazy.core.segments import NO_LIMIT, ChunkLimit


def segments_in(prompt: Any, separator: str, limit: ChunkLimit = NO_LIMIT) -> list[Any] | None:
    """The segments of a text, or of each of a list of texts; None if no text has the separator.

    separator: empty for none.  limit: on the chunks of each text. Raises
    TooManyChunks for a text with more separators than any prompt within it needs, ValueError for an odd number.
    """
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not separator or not all(isinstance(text, str) for text in texts) or separator not in "".join(texts):
        return None
    for text in texts:
        limit.check_separators(text.count(separator))
    return [_split(text, separator) for text in texts] if isinstance(prompt, list) else _split(prompt, separator)


def check_separator(separator: str | None, prompt: Any) -> None:
    """Raise ValueError if a request names a separator for a prompt that is no text."""
    if separator and not isinstance(prompt[0] if isinstance(prompt, list) and prompt else prompt, str):
        raise ValueError("chunk_separator divides text, but the prompt is given as segments or tokens")


def divide(text: str, separator: str) -> list[tuple[str, bool]]:
    """The pieces of a text between its separators, and whether each is a chunk.

    Separators come in pairs, one before and one after each chunk; all else is text, and so is a blank piece.
    Raises ValueError for an odd number of separators.
    """
    pieces = text.split(separator)
    if len(pieces) % 2 == 0:
        between = separator.join(["", "A", "", "B", ""])
        raise ValueError(
            f"{len(pieces) - 1} of the chunk separator {separator!r:.40}: it comes in pairs, before and after each "
            f"chunk, as in {between!r:.120}"
        )
    return [(piece, i % 2 == 1 and not piece.isspace()) for i, piece in enumerate(pieces) if piece]


def _split(text: str, separator: str) -> list[dict[str, str]]:
    segments: list[dict[str, str]] = []
    for is_chunk, run in itertools.groupby(divide(text, separator), key=lambda piece: piece[1]):
        texts = [piece for piece, _ in run]
        kind, texts = ("chunk", texts) if is_chunk else ("text", ["".join(texts)])
        segments += [{"type": kind, "text": text} for text in texts]
    return segments

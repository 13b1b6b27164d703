"""Chunks in plain text, for clients that cannot send segments: the text between two separators."""

from typing import Any

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.segments import NO_LIMIT, ChunkLimit


def segments_in(prompt: Any, separator: str | None, limit: ChunkLimit = NO_LIMIT) -> list[Any] | None:
    """The segments of a text, or of each of a list of texts; None if no text has the separator.

    separator: the request's; None for the server's, empty for none.  limit: on the chunks of each text. Raises
    TooManyChunks for a text with more separators than any prompt within it needs.
    """
    separator = chosen_separator(separator)
    texts = prompt if isinstance(prompt, list) else [prompt]
    if not separator or not all(isinstance(text, str) for text in texts) or separator not in "".join(texts):
        return None
    for text in texts:
        limit.check_separators(text.count(separator))
    return [_split(text, separator) for text in texts] if isinstance(prompt, list) else _split(prompt, separator)


def chosen_separator(separator: str | None) -> str:
    """The request's separator, or the server's if it names none; empty for none."""
    return LazyConfig.current().chunk_separator if separator is None else separator


def check_separator(separator: str | None, prompt: Any) -> None:
    """Raise ValueError if a request names a separator for a prompt that is no text."""
    if separator and not isinstance(prompt[0] if isinstance(prompt, list) and prompt else prompt, str):
        raise ValueError("chunk_separator divides text, but the prompt is given as segments or tokens")


def _split(text: str, separator: str) -> list[dict[str, str]]:
    pieces = text.split(separator)
    between = range(1, len(pieces) - 1)
    return [{"type": "chunk" if i in between else "text", "text": piece} for i, piece in enumerate(pieces) if piece]

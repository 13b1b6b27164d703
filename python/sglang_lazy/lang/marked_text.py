"""Text that keeps track of its chunks.

SGLang's interpreter keeps a program's prompt as one string. `MarkedText` is a string that carries the positions of its
chunks, and their link, through the operations that the interpreter uses. The marks are not part of the text: no
document can forge a boundary, and users see plain text.
"""

from typing import Any, NamedTuple

from sglang_lazy.core.labels import Label


class Mark(NamedTuple):
    """A chunk at the characters from `start` to `end`: their text, or a registered one, for which they stand."""

    start: int
    end: int
    id: str | None = None
    label: Label | None = None


class MarkedText(str):
    """A string with chunks at the ordered, disjoint `chunks`.

    link: policy of a prompt of this text, None for the server's default. The later of two joined strings decides.
    """

    chunks: tuple[Mark, ...]
    link: str | None

    def __new__(cls, text: str, chunks: tuple[Mark, ...] = (), link: str | None = None) -> "MarkedText":
        self = super().__new__(cls, text)
        self.chunks = chunks
        self.link = link
        return self

    def __getnewargs__(self):
        return str.__str__(self), self.chunks, self.link

    def __str__(self) -> "MarkedText":
        return self

    def __add__(self, other: str) -> "MarkedText":
        if not isinstance(other, str):
            return NotImplemented
        chunks = self.chunks + _shift(chunks_of(other), len(self))
        return MarkedText(super().__add__(other), chunks, link_of(other) or self.link)

    def __radd__(self, other: str) -> "MarkedText":
        if not isinstance(other, str):
            return NotImplemented
        chunks = chunks_of(other) + _shift(self.chunks, len(other))
        return MarkedText(str.__add__(other, self), chunks, self.link or link_of(other))

    def __getitem__(self, key: Any) -> str:
        """A slice keeps the chunks that lie entirely in it."""
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            return text
        start, stop, step = key.indices(len(self))
        kept = tuple(mark for mark in self.chunks if step == 1 and start <= mark.start and mark.end <= stop)
        return MarkedText(text, _shift(kept, -start), self.link)

    def segments(self) -> list[dict[str, Any]]:
        """The text as a request carries it, without empty segments."""
        segments: list[dict[str, Any]] = []
        position = 0
        for start, end, name, label in (*self.chunks, Mark(len(self), len(self))):
            segments.append({"type": "text", "text": str.__getitem__(self, slice(position, start))})
            content = {"text": str.__getitem__(self, slice(start, end))} if name is None else {"id": name}
            segments.append({"type": "chunk", **content, **(label.fields() if label else {})})
            position = end
        return [segment for segment in segments if segment.get("text") != ""]


def chunks_of(text: str) -> tuple[Mark, ...]:
    """The positions of the chunks of any string."""
    return text.chunks if isinstance(text, MarkedText) else ()


def link_of(text: str) -> str | None:
    """The link of any string, None if it has none."""
    return text.link if isinstance(text, MarkedText) else None


def _shift(chunks: tuple[Mark, ...], offset: int) -> tuple[Mark, ...]:
    return tuple(mark._replace(start=mark.start + offset, end=mark.end + offset) for mark in chunks)

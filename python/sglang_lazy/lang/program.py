"""`sgl.chunk()` and `sgl.link()` in SGLang's frontend language: a program's text remembers where its chunks lie.

The interpreter keeps a program's prompt as one string. `MarkedText` is a string that carries the positions of chunks,
and their link, through the operations the interpreter uses on it, beside the characters and not among them: no document
can forge a boundary, and users see plain text. When such a string is sent, it is sent as segments.
"""

from collections.abc import Callable
from typing import Any

from sglang.lang.ir import SglConstantText, SglExpr

from sglang_lazy.core.segments import check_link

INFO_ROUTE = "/lazy_info"
"""Answered by servers that understand chunks; unknown to stock SGLang."""

_known_servers: set[str] = set()


class MarkedText(str):
    """A string in which `chunks`, ordered and disjoint (start, end) positions of characters, are chunks.

    link: how a prompt of this text is answered, None for the server's default. Of two joined strings, the later counts.
    """

    chunks: tuple[tuple[int, int], ...]
    link: str | None

    def __new__(cls, text: str, chunks: tuple[tuple[int, int], ...] = (), link: str | None = None) -> "MarkedText":
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
        chunks = self.chunks + _shift(_chunks(other), len(self))
        return MarkedText(super().__add__(other), chunks, _link(other) or self.link)

    def __radd__(self, other: str) -> "MarkedText":
        if not isinstance(other, str):
            return NotImplemented
        chunks = _chunks(other) + _shift(self.chunks, len(other))
        return MarkedText(str.__add__(other, self), chunks, self.link or _link(other))

    def __getitem__(self, key: Any) -> str:
        """A slice keeps the chunks that lie in it whole."""
        text = super().__getitem__(key)
        if not isinstance(key, slice):
            return text
        start, stop, step = key.indices(len(self))
        kept = tuple(span for span in self.chunks if step == 1 and start <= span[0] and span[1] <= stop)
        return MarkedText(text, _shift(kept, -start), self.link)

    def segments(self) -> list[dict[str, str]]:
        """The text as a request carries it, without empty segments."""
        segments, position = [], 0
        for start, end in (*self.chunks, (len(self), len(self))):
            segments.append({"type": "text", "text": str.__getitem__(self, slice(position, start))})
            segments.append({"type": "chunk", "text": str.__getitem__(self, slice(start, end))})
            position = end
        return [segment for segment in segments if segment["text"]]


def _chunks(text: str) -> tuple[tuple[int, int], ...]:
    return text.chunks if isinstance(text, MarkedText) else ()


def _link(text: str) -> str | None:
    return text.link if isinstance(text, MarkedText) else None


def _shift(chunks: tuple[tuple[int, int], ...], offset: int) -> tuple[tuple[int, int], ...]:
    return tuple((start + offset, end + offset) for start, end in chunks)


class Chunk(SglConstantText):
    """A chunk in a program (`s += chunk(…)`) or in `Engine.generate(segments=[…])`."""

    def __init__(self, text: str):
        super().__init__(MarkedText(text, ((0, len(text)),)))

    def to_segment(self) -> dict[str, str]:
        return {"type": "chunk", "text": str.__str__(self.value)}

    def __format__(self, spec: str) -> str:
        raise TypeError("a chunk inside an f-string would lose its boundaries: append it with + or += instead")

    def __repr__(self) -> str:
        return f"Chunk({str.__repr__(self.value)})"


def make_chunk(text: Any) -> SglExpr:
    """The chunk of `text`; see `sglang_lazy.chunk`."""
    connect()
    if isinstance(text, SglExpr):  # an argument without a value, while SGLang traces a program
        return text
    if not isinstance(text, str):
        raise ValueError(f"a chunk must be a string, got {type(text).__name__}")
    if not text:
        raise ValueError("a chunk must not be empty")
    return Chunk(text)


def make_link(how: Any) -> SglExpr:
    """Text without characters that carries `how`; see `sglang_lazy.link`."""
    connect()
    if isinstance(how, SglExpr):  # an argument without a value, while SGLang traces a program
        return how
    return SglConstantText(MarkedText("", link=check_link(how)))


def connect() -> None:
    """Let `RuntimeEndpoint` send chunks. Done when a program makes its first one: making one is asking for it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_lazy.port.plugin import CLIENT_HOOKS

    if all(hook.target in HookRegistry._patched for hook in CLIENT_HOOKS):
        return
    for hook in CLIENT_HOOKS:
        HookRegistry.register(hook.target, send, HookType[hook.kind])
    HookRegistry.apply_hooks()


def send(stock: Callable, url: str, json: Any = None, **kwargs: Any) -> Any:
    """Hook around `http_request` of the frontend's backends: marked text is sent as segments.

    Raises RuntimeError if the server does not understand chunks.
    """
    text = json.get("text") if isinstance(json, dict) else None
    if not any(_chunks(item) for item in (text if isinstance(text, list) else [text])):
        return stock(url, json, **kwargs)
    _check_server(stock, url.removesuffix("/generate"), **kwargs)
    json = {key: value for key, value in json.items() if key != "text"}
    json["segments"] = [_segments(item) for item in text] if isinstance(text, list) else _segments(text)
    json["link"] = [_link(item) for item in text] if isinstance(text, list) else _link(text)
    return stock(url, json, **kwargs)


def _segments(text: str) -> list[dict[str, str]]:
    return (text if isinstance(text, MarkedText) else MarkedText(text)).segments()


def _check_server(stock: Callable, base_url: str, api_key: str | None = None, verify: Any = None, **_: Any) -> None:
    if base_url in _known_servers:
        return
    if stock(base_url + INFO_ROUTE, api_key=api_key, verify=verify).status_code == 404:
        raise RuntimeError(
            f"the server at {base_url} does not understand chunks: start it with python -m sglang_lazy.launch_server"
        )
    _known_servers.add(base_url)

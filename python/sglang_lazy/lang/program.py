"""Chunks and links in programs of SGLang's frontend language, and requests that carry them."""

from collections.abc import Callable
from typing import Any

from sglang.lang.ir import SglConstantText, SglExpr

from sglang_lazy.core.config import INFO_ROUTE
from sglang_lazy.core.labels import Label, parse_label
from sglang_lazy.lang.marked_text import Mark, MarkedText, chunks_of, link_of
from sglang_lazy.policies import get_policy
from sglang_lazy.port.hooks import Hooks, apply
from sglang_lazy.serving.chunk_lists import check_id

_known_servers: set[str] = set()
_HOOKS = Hooks()
"""Applied at the first chunk: programs without chunks send as they did."""


class Chunk(SglConstantText):
    """A chunk in a program (`s += chunk(…)`) or in `Engine.generate(segments=[…])`."""

    def __init__(self, text: str, id: str | None = None, label: Label | None = None):
        super().__init__(MarkedText(text, (Mark(0, len(text), id, label),)))

    def to_segment(self) -> dict[str, Any]:
        (segment,) = self.value.segments()
        return segment

    def __format__(self, spec: str) -> str:
        raise TypeError("a chunk inside an f-string would lose its boundaries: append it with + or += instead")

    def __repr__(self) -> str:
        return f"Chunk({str.__repr__(self.value)})"


def make_chunk(text: Any, id: Any, name: Any, metadata: Any) -> SglExpr:
    """The chunk of `text`, or the registered one with this id; see `sglang_lazy.chunk`."""
    apply(_HOOKS)
    if (text is None) == (id is None):
        raise ValueError("a chunk needs either a text or an id")
    for given in (text, id):
        if isinstance(given, SglExpr):  # an argument whose value is unknown while SGLang traces a program
            return given
    label = parse_label(name, metadata)
    if id is not None:
        if not isinstance(id, str):
            raise ValueError(f"the id of a chunk must be a string, got {type(id).__name__}")
        return Chunk(f"[chunk {id}]", check_id(id), label)
    if not isinstance(text, str):
        raise ValueError(f"a chunk must be a string, got {type(text).__name__}")
    if not text:
        raise ValueError("a chunk must not be empty")
    return Chunk(text, label=label)


def make_link(policy: Any) -> SglExpr:
    """Empty text that carries `policy`; see `sglang_lazy.link`."""
    apply(_HOOKS)
    if isinstance(policy, SglExpr):  # an argument whose value is unknown while SGLang traces a program
        return policy
    return SglConstantText(MarkedText("", link=str(get_policy(policy))))


@_HOOKS.on("sglang.lang.backend.runtime_endpoint").feature(
    "http_request", "AROUND", "chunks in programs of the frontend language are sent as segments"
)
def send(stock: Callable, url: str, json: Any = None, **kwargs: Any) -> Any:
    """Around the requests of SGLang's frontend backends: send text with chunks as segments.

    Raises RuntimeError if the server does not understand chunks.
    """
    text: Any = json.get("text") if isinstance(json, dict) else None
    if not any(chunks_of(item) for item in (text if isinstance(text, list) else [text])):
        return stock(url, json, **kwargs)
    _check_server(stock, url.removesuffix("/generate"), **kwargs)
    json = {key: value for key, value in json.items() if key != "text"}
    json["segments"] = [_segments(item) for item in text] if isinstance(text, list) else _segments(text)
    json["link"] = [link_of(item) for item in text] if isinstance(text, list) else link_of(text)
    return stock(url, json, **kwargs)


def _segments(text: str) -> list[dict[str, Any]]:
    return (text if isinstance(text, MarkedText) else MarkedText(text)).segments()


def _check_server(stock: Callable, base_url: str, api_key: str | None = None, verify: Any = None, **_: Any) -> None:
    if base_url in _known_servers:
        return
    if stock(base_url + INFO_ROUTE, api_key=api_key, verify=verify).status_code == 404:
        raise RuntimeError(
            f"the server at {base_url} does not understand chunks: start it with python -m sglang_lazy.launch_server"
        )
    _known_servers.add(base_url)

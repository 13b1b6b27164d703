"""SGLang with a KV cache that reuses any text chunk at any place in a prompt.

    import sglang_lazy as sgl

has the public names of `sglang` too, so that `sgl.function`, `sgl.gen` and `sgl.chunk` stand side by side. Importing it
changes nothing in SGLang: the server, `Engine` and `Runtime` activate chunk reuse, and a program's first `chunk` or
`link` hooks the frontend's client.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from sglang_lazy.core.config import LazyConfig

if TYPE_CHECKING:
    from sglang.lang.ir import SglExpr

    from sglang_lazy.entrypoints.engine import Engine
    from sglang_lazy.entrypoints.runtime import Runtime

__all__ = ["Engine", "LazyConfig", "Runtime", "chunk", "link"]

_LATE = {"Engine": "sglang_lazy.entrypoints.engine", "Runtime": "sglang_lazy.entrypoints.runtime"}


def chunk(
    text: str | None = None,
    *,
    id: str | None = None,
    name: str | None = None,
    metadata: dict[str, Any] | None = None,
) -> "SglExpr":
    """A chunk: text whose KV is computed once, alone, and reused wherever it stands in a prompt.

    For `Engine.generate(segments=[…])`, and for programs of SGLang's frontend language: `s += chunk(document)`.
    id: of a registered chunk, in place of its text; 16 to 64 hexadecimal digits. A program's text then has "[chunk …]"
    where the chunk is.  name, metadata: shown in lists of chunks and on the page `/lazy`; they change no KV. Raises
    ValueError if `text` is empty or not a string, for a malformed id, and for a label that is no name or too long.
    """
    from sglang_lazy.lang.program import make_chunk

    return make_chunk(text, id, name, metadata)


def link(policy: str) -> "SglExpr":
    """The policy for a program's chunks from here on: `s += link("full")`. Adds no text.

    A program without it gets the server's default. Raises ValueError for an unknown policy.
    """
    from sglang_lazy.lang.program import make_link

    return make_link(policy)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is None:
        sglang = importlib.import_module("sglang")
        if name in sglang.__all__:
            return getattr(sglang, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

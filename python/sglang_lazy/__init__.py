"""SGLang with a KV cache that reuses any text chunk at any place in a prompt."""

import importlib
import importlib.abc
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from sglang_lazy.core.config import LazyConfig

if TYPE_CHECKING:
    from sglang.lang.ir import SglExpr

    from sglang_lazy.entrypoints.engine import Engine
    from sglang_lazy.entrypoints.runtime import Runtime

__all__ = ["Engine", "LazyConfig", "Runtime", "chunk", "link"]

_LAZY = {"Engine": "sglang_lazy.entrypoints.engine", "Runtime": "sglang_lazy.entrypoints.runtime"}


def chunk(text: str) -> "SglExpr":
    """A chunk: text whose KV is computed once, alone, and reused wherever it stands in a prompt.

    For `Engine.generate(segments=[…])` and, as `sgl.chunk(…)`, for programs of SGLang's frontend language.
    Raises ValueError if `text` is empty or no string.
    """
    from sglang_lazy.lang.language import make_chunk

    return make_chunk(text)


def link(how: str) -> "SglExpr":
    """How a program of SGLang's frontend language wants its prompts with chunks answered, from here on: block or full.

    Appended like text, as `sgl.link(…)`; adds none. Without it the server's default holds. Raises ValueError on others.
    """
    from sglang_lazy.lang.language import make_link

    return make_link(how)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


class _OfferChunk(importlib.abc.MetaPathFinder):
    """Adds ours to `sglang` when a program imports it after us, without importing it for those that never do."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "sglang":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                _offer(module)

            spec.loader.exec_module = exec_module
        return spec


def _offer(module: types.ModuleType) -> None:
    module.chunk, module.link = chunk, link


if "sglang" in sys.modules:
    _offer(sys.modules["sglang"])
else:
    sys.meta_path.insert(0, _OfferChunk())

"""SGLang with a KV cache that reuses any text chunk at any place in a prompt."""

import importlib
import importlib.abc
import importlib.util
import sys
import types
from typing import TYPE_CHECKING, Any

from sglang_lazy.config import LazyConfig

if TYPE_CHECKING:
    from sglang.lang.ir import SglExpr

    from sglang_lazy.engine import Engine
    from sglang_lazy.runtime import Runtime

__all__ = ["Engine", "LazyConfig", "Runtime", "chunk"]

_LAZY = {"Engine": "sglang_lazy.engine", "Runtime": "sglang_lazy.runtime"}


def chunk(text: str) -> "SglExpr":
    """A chunk: text whose KV is computed once, alone, and reused wherever it stands in a prompt.

    For `Engine.generate(segments=[…])` and, as `sgl.chunk(…)`, for programs of SGLang's frontend language.
    Raises ValueError if `text` is empty or no string.
    """
    from sglang_lazy.frontend.language import make_chunk

    return make_chunk(text)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


class _OfferChunk(importlib.abc.MetaPathFinder):
    """Adds `sglang.chunk` when a program imports sglang after us, without importing it for those that never do."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "sglang":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                module.chunk = chunk

            spec.loader.exec_module = exec_module
        return spec


if "sglang" in sys.modules:
    sys.modules["sglang"].chunk = chunk
else:
    sys.meta_path.insert(0, _OfferChunk())

"""Attention over cached chunks at any position: queries are rotated, keys stay as stored."""

import importlib
from types import ModuleType
from typing import Any

__all__ = ["IMPLEMENTATIONS", "get_implementation", "rope_cos_sin", "rotate_queries"]
__version__ = "0.2.0"

IMPLEMENTATIONS = {
    "torch": "sgl_kernel_lazy.torch_impl",
    "cuda": "sgl_kernel_lazy.cuda",
    "triton": "sgl_kernel_lazy.triton",
}


def get_implementation(name: str) -> ModuleType:
    """The implementation of this name, a module with the ops of `sgl_kernel_lazy.torch_impl`.

    Its `unsupported` tells what it cannot serve.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {sorted(IMPLEMENTATIONS)}, got {name!r}")
    return importlib.import_module(IMPLEMENTATIONS[name])


def __getattr__(name: str) -> Any:
    # torch is imported on first use only, so that `import sgl_kernel_lazy` stays cheap.
    if name in ("rope_cos_sin", "rotate_queries"):
        return getattr(importlib.import_module("sgl_kernel_lazy.rope"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Makes SGLang's Triton attention use whole windows in decode. SGLang 0.5.23 omits the farthest token of a window there
(its pull request 32087), unlike in other backends and in prefill. Linked rows do not use it."""

from typing import Any


def widen(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `TritonAttnBackend.__init__`.

    SGLang's window size does not count the query's own token, but decode takes that many tokens from the end of a row,
    own token included. In prefill, one more cached token is now taken than needed; the kernel masks it.
    """
    if (backend.sliding_window_size or -1) > 0:
        backend.sliding_window_size += 1


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__"
    HookRegistry.register(target, widen, HookType.AFTER)

"""SGLang's Triton attention with whole windows in decode. That of 0.5.17 leaves out the farthest token of a window (its
pull request 32087), where other backends and its own prefill see it. Linked rows do not take it."""

from typing import Any


def widen(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `TritonAttnBackend.__init__`.

    SGLang counts the tokens before the token itself; of a decode batch's rows, which end in that, it takes as many.
    Of a prefill batch's cached tokens it now takes one too many, which the kernel masks.
    """
    if (backend.sliding_window_size or -1) > 0:
        backend.sliding_window_size += 1


def load() -> None:
    """As a plugin of SGLang's, in each of the processes that it starts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.layers.attention.triton_backend.TritonAttnBackend.__init__"
    HookRegistry.register(target, widen, HookType.AFTER)

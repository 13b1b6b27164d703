"""A required hook on something that SGLang does not call: `ServerArgs` is a struct, whose `__post_init__` is looked up
when its class is made."""

from typing import Any

from sglang_lazy.port import hooks

TARGET = "sglang.srt.server_args.ServerArgs.__post_init__"


def never(_args: Any) -> None:
    raise AssertionError


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    hooks.apply([hooks.Hook(TARGET, never, "BEFORE", "required", "a test", process="scheduler")])

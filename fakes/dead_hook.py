"""A required hook on something that SGLang does not call: `ServerArgs` is a struct, whose `__post_init__` is looked up
when its class is made."""

from typing import Any

from sglang_lazy.port import hooks

PLACE, NAME = "sglang.srt.server_args.ServerArgs", "__post_init__"
TARGET = f"{PLACE}.{NAME}"


def never(_args: Any) -> None:
    raise AssertionError


def load() -> None:
    """The SGLang plugin; runs in each process that SGLang starts."""
    hooks.apply([hooks.on(PLACE).required(NAME, never, "BEFORE", "scheduler", "a test")])

"""An object with some of its attributes replaced."""

from typing import Any


class Overlay:
    """`target` with the given attributes replaced."""

    def __init__(self, target: Any, **replaced: Any):
        self.__dict__.update(replaced, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

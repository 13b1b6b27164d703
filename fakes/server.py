"""The state of an HTTP process in front of a server that only remembers what it is asked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.serving.frontend import Frontend
from sglang_lazy.serving.server import Repeated


@dataclasses.dataclass
class FakeServer:
    """A `Server`.  asked: the verb and arguments of each call of `ask`."""

    tokenizer: Any = None
    vocab_size: int = 100
    context_len: float = 32
    truncates: bool = False
    model_path: str = ""
    default_params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_workers: int = 1
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    has_admin_key: bool = False
    is_idle: bool = True
    is_ending: bool = False
    asked: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)

    def answer(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """The scheduler's answer."""
        raise NotImplementedError

    async def ask(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        self.asked.append((verb, arguments))
        return [self.answer(verb, **arguments)]

    async def compute(self, input_ids: list[int], params: dict[str, Any], adapter: str | None) -> str | None:
        raise NotImplementedError

    async def repeat(self, request: Any, rid: str, input_ids: list[int], params: dict[str, Any]) -> Repeated:
        raise NotImplementedError

    async def flush(self, timeout_s: float) -> bool:
        raise NotImplementedError

    def abort(self, rid: str) -> bool:
        raise NotImplementedError


def new_frontend(server: FakeServer | None = None, **config: Any) -> Frontend:
    """The state of a process with this configuration."""
    return Frontend(LazyConfig(**config), server or FakeServer())

"""Responses that SGLang stores, with the messages before them, so that others may follow: it never forgets any.

Here the least recently used are forgotten once all take `CAPACITY` bytes. Following one of these gives a 404.

Can go once SGLang bounds them.
"""

from collections.abc import Mapping
from typing import Any

from sglang_lazy.core.remembered import Remembered, deep_size
from sglang_lazy.port.hooks import repair

CAPACITY = 1 << 28
"""256 MiB."""


class Field:
    """One field of the stored records, as the dictionary by response id that SGLang uses."""

    def __init__(self, records: Remembered[str, Mapping[str, Any]], name: str):
        self._records, self._name = records, name

    def get(self, response_id: str, default: Any = None) -> Any:
        return (self._records.get(response_id) or {}).get(self._name, default)

    def __getitem__(self, response_id: str) -> Any:
        """Raises ValueError, answered with a 400, if it has been forgotten since the response was looked up, or was
        too large."""
        if (value := self.get(response_id)) is None:
            raise ValueError(f"{response_id} is no longer stored with its {self._name}: send the whole conversation")
        return value

    def __setitem__(self, response_id: str, value: Any) -> None:
        self._records.put(response_id, {**(self._records.get(response_id) or {}), self._name: value})


def bound(_result: Any, serving: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `OpenAIServingResponses.__init__`: store both in records that are forgotten together."""
    records = Remembered[str, Mapping[str, Any]](CAPACITY, size=lambda key, record: deep_size([key, record]))
    serving.response_store, serving.msg_store = Field(records, "response"), Field(records, "messages")


HOOKS = (
    repair(
        "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses.__init__",
        bound,
        "AFTER",
        "stored responses take bounded memory",
        "SGLang bounds them",
    ),
)

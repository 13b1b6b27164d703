"""Labels of chunks: what people call them. They are never part of a chunk's identity, nor seen by the model."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang_lazy.core.names import check_name

MAX_METADATA = 2048
"""Bytes of a chunk's metadata, as JSON in UTF-8."""
LABEL_KEYS = frozenset(("name", "metadata"))


class Label(NamedTuple):
    """name: None without one.  packed: the metadata, an object as JSON; empty without any."""

    name: str | None = None
    packed: str = ""

    def fields(self) -> dict[str, Any]:
        """The label as lists show it."""
        return {"name": self.name, "metadata": json.loads(self.packed) if self.packed else None}


def parse_label(name: Any, metadata: Any) -> Label | None:
    """The label with these fields, None if both are None. Raises ValueError for bad or long ones."""
    if name is None and metadata is None:
        return None
    if name is not None:
        check_name("name", name)
    if metadata is None:
        return Label(name)
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata must be an object, got {type(metadata).__name__}")
    try:
        packed = json.dumps(metadata, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        size = len(packed.encode())
    except (TypeError, ValueError, RecursionError):
        raise ValueError("metadata must be JSON") from None
    if size > MAX_METADATA:
        raise ValueError(f"metadata may have {MAX_METADATA} bytes as JSON, got {size}")
    return Label(name, packed)

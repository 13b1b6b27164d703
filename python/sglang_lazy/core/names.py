"""Names that clients choose: salts, ids and the like. They appear in logs, answers and lists."""

from typing import Any

MAX_NAME = 256
"""Characters of a name."""


def check_name(what: str, name: Any) -> str:
    """`name` if it is a non-empty string of at most `MAX_NAME` printable characters, else ValueError."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise ValueError(
            f"{what} must be a non-empty string of at most {MAX_NAME} printable characters, got {ascii(name):.50}"
        )
    return name

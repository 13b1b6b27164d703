"""Errors of pydantic's, told by the one that matters: where it is and what is wrong, in a line."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

_ALTERNATIVE = re.compile(r"[A-Z]\w*|.*[\[(].*|str|int|float|bool|bytes|dict|list|nullable|none")
"""Parts of a location that name an alternative of a union, not a field."""
_PROMPTS = (("text",), ("prompt",))
_TAGS = ("type", "role")
"""Fields that say which alternative is meant."""
_SHOULD = "Input should be "
_MAX_LENGTH = 500


def told(error: ValueError) -> str:
    """The message of an error, the one that matters of a ValidationError."""
    return the_one(error.errors(include_url=False)) if isinstance(error, ValidationError) else str(error)


def the_one(errors: Sequence[Mapping[str, Any]]) -> str:
    """The message for the one of pydantic's `errors` that matters.

    Where there are alternatives, each has errors. The one that was meant fits best: its errors are deepest and, of
    those equally deep, not in an alternative of another `type` or `role`.
    """
    others = {_split(one)[1] for one in errors if _path(one)[-1:] and _path(one)[-1] in _TAGS}

    def rank(one: Mapping[str, Any]) -> tuple[int, int]:
        path, alternatives = _split(one)
        return -len(path), sum(alternatives[:end] in others for end in range(1, len(alternatives) + 1))

    best = min(errors, key=rank)
    same = [one for one in errors if _path(one) == _path(best) and rank(one) == rank(best)]
    where, what = _where(best), _what(same)
    return f"{where}: {what}"[:_MAX_LENGTH] if where else what[:_MAX_LENGTH]


def _split(error: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The fields and indices in an error's location, and the alternatives in it."""
    location = tuple(error.get("loc") or ())
    path = tuple(part for part in location if isinstance(part, int) or not _ALTERNATIVE.fullmatch(part))
    return path, tuple(part for part in location if part not in path)


def _path(error: Mapping[str, Any]) -> tuple[Any, ...]:
    return _split(error)[0]


def _where(error: Mapping[str, Any]) -> str:
    path = list(_path(error))
    if error.get("type") == "json_invalid":
        return "the body is not JSON"
    if path and path[0] in ("query", "path", "header", "cookie"):
        return f"{path[0]} {path[-1]}"
    if path[:1] == ["body"]:
        del path[0]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def _what(errors: Sequence[Mapping[str, Any]]) -> str:
    """What is wrong in one place, and what is there unless it is long."""
    if errors[0].get("type") == "json_invalid":
        return str((errors[0].get("ctx") or {}).get("error", errors[0]["msg"]))
    messages = list(dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in errors))
    expected = [message.removeprefix(_SHOULD) for message in messages if message.startswith(_SHOULD)]
    if any("an instance of" in message for message in expected):
        expected = ["an object"]
    reasons = [message for message in messages if not message.startswith(_SHOULD)]
    if expected:
        reasons.append(_SHOULD + " or ".join(expected))
    value = errors[0].get("input")
    if isinstance(value, Mapping) and value.get("type") == "chunk" and _path(errors[0])[1:2] in _PROMPTS:
        return "a prompt with chunks is given as `segments`"
    short = isinstance(value, str | int | float) and len(repr(value)) <= 50 and errors[0].get("type") != "missing"
    return "; ".join(reasons) + (f", got {value!r}" if short and expected else "")

"""Errors of bodies. Pydantic's are told by the one that matters: where it is and what is wrong, in a line."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import HTTPException
from pydantic import ValidationError

from sglang_lazy.core.segments import TooManyChunks

_ALTERNATIVE = re.compile(r"[A-Z]\w*|.*[\[(].*|str|int|float|bool|bytes|dict|list|nullable|none")
"""Parts of a location that name an alternative of a union, not a field."""
_TAGS = ("type", "role")
"""Fields that say which alternative is meant."""
_PLACES = ("query", "path", "header", "cookie")
_SHOULD = "Input should be "
_MOST, _MAX_LENGTH = 500, 500
"""How many errors are looked at, and how many characters are told."""


class _Error(NamedTuple):
    """path: fields and indices of its location. alternatives: those of unions in it. told: as pydantic has it."""

    path: tuple[str | int, ...]
    alternatives: tuple[str, ...]
    told: Mapping[str, Any]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "_Error":
        path: list[str | int] = []
        alternatives: list[str] = []
        for part in told.get("loc") or ():
            if isinstance(part, str) and _ALTERNATIVE.fullmatch(part):
                alternatives.append(part)
            else:
                path.append(part)
        return cls(tuple(path), tuple(alternatives), told)


@contextlib.contextmanager
def taking_chunks() -> Iterator[None]:
    """A context for validators that take chunks out of a body: too many are answered with a 400 at once. As an error of
    validation, it would be reported together with the whole body."""
    try:
        yield
    except TooManyChunks as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None


def told(error: ValueError) -> str:
    """The message of an error, the one that matters of a ValidationError."""
    return the_one(error.errors(include_url=False)) if isinstance(error, ValidationError) else str(error)


def the_one(errors: Sequence[Mapping[str, Any]]) -> str:
    """The message for the one of pydantic's `errors`, at least one, that matters.

    Where there are alternatives, each has errors. The one that was meant fits best: its errors are deepest and, of
    those equally deep, not in an alternative of another `type` or `role`, and few.
    """
    found = [_Error.of(one) for one in errors[:_MOST]]
    counts = Counter(one.alternatives for one in found)
    others = {one.alternatives for one in found if one.path and one.path[-1] in _TAGS}

    def rank(one: _Error) -> tuple[int, int, int]:
        ends = range(1, len(one.alternatives) + 1)
        return -len(one.path), sum(one.alternatives[:end] in others for end in ends), counts[one.alternatives]

    ranks = [rank(one) for one in found]
    best = min(ranks)
    first = found[ranks.index(best)]
    same = [one.told for one, its in zip(found, ranks, strict=True) if its == best and one.path == first.path]
    return ": ".join(filter(None, _place_and_fault(first.path, same)))[:_MAX_LENGTH]


def _place_and_fault(path: Sequence[str | int], errors: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Where the errors of one place are, and what is wrong there, with what is there unless it is long."""
    first = errors[0]
    if first.get("type") == "json_invalid":
        return "the body is not JSON", str((first.get("ctx") or {}).get("error", first["msg"]))
    inside = path[1:] if path[:1] == ("body",) else path
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inside).removeprefix(".")
    if path and path[0] in _PLACES:
        where = f"{path[0]} {path[-1]}"
    value = first.get("input")
    if isinstance(value, Mapping) and value.get("type") == "chunk" and inside[:1] in (("text",), ("prompt",)):
        return where, "a prompt with chunks is given as `segments`"
    messages = list(dict.fromkeys(one["msg"].removeprefix("Value error, ") for one in errors))
    faults = [message for message in messages if not message.startswith(_SHOULD)]
    if expected := [message.removeprefix(_SHOULD) for message in messages if message.startswith(_SHOULD)]:
        if any("instance of" in message for message in expected):  # of a class that clients do not know
            expected = ["an object"]
        if inside[-1:] == ("type",) and "content" in inside:
            expected.append("'chunk'")  # parts of this type are taken out before pydantic sees the others
        short = isinstance(value, str | int | float) and len(repr(value)) <= 50
        faults.append(_SHOULD + " or ".join(expected) + (f", got {value!r}" if short else ""))
    return where, "; ".join(faults)

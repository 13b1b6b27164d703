"""Fields of ours in the bodies of requests, on routes that take them and on those that do not."""

from collections.abc import Collection, Iterable

FIELDS = ("segments", "link", "cache_salt", "chunk_separator", "chunk_roles")
FORMER = {"salt": "cache_salt"}
"""Former names of fields."""


def check_fields(given: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for a field that a route would ignore although it is one of ours, or nearly so.

    given: names in the body.  known: fields of the route's API, which are never refused. Others are left to SGLang,
    which ignores what it does not know: a misspelt `link` would be answered under another policy, a misspelt
    `cache_salt` from everybody's cache.
    """
    for name in given:
        if name in known:
            continue
        if name == "segments":
            raise ValueError(
                "segments are for /generate and /v1/completions; in a chat, chunks are content parts "
                '{"type": "chunk", "text": "..."}'
            )
        if name in FIELDS:
            raise ValueError(f"{name} is not a field of this route")
        if (meant := FORMER.get(name) or nearest(name)) is not None:
            hint = f"did you mean {meant!r}?" if meant in known else f"{meant!r} is not a field of this route either"
            raise ValueError(f"unknown field {name!r:.50}: {hint}")


def nearest(name: str) -> str | None:
    """The field of ours that `name` misspells, None if it is like none of them.

    Case and punctuation do not count. Otherwise one letter may be missing, added or swapped with the next; in names of
    more than six letters two, or wrong ones. A wrong letter makes another word of a short name, such as `line`.
    """
    if not 3 <= len(name) <= 20:
        return None
    plain = _letters(name)
    return next((field for field in FIELDS if _is_near(plain, _letters(field))), None)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _is_near(name: str, field: str) -> bool:
    is_long = len(field) > 6
    most = 2 if is_long else 1
    if abs(len(name) - len(field)) > most or _distance(name, field) > most:
        return False
    return is_long or len(name) != len(field) or sorted(name) == sorted(field)


def _distance(one: str, other: str) -> int:
    """Damerau and Levenshtein's: letters that are wrong, missing, added, or swapped with the next."""
    rows: list[list[int]] = [list(range(len(other) + 1))]
    for i, letter in enumerate(one):
        row = [i + 1]
        for j, wanted in enumerate(other):
            cost = min(rows[i][j + 1] + 1, row[j] + 1, rows[i][j] + (letter != wanted))
            if i and j and one[i - 1] == wanted and letter == other[j - 1]:
                cost = min(cost, rows[i - 1][j - 1] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]

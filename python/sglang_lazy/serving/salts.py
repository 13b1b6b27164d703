"""Cache salts of requests, in their bodies and in the header that a gateway sets."""

from typing import Any

from sglang_lazy.core.config import SALT_HEADER
from sglang_lazy.core.names import check_name


def check_cache_salt(cache_salt: Any) -> str | None:
    """`cache_salt` if it is a name or None, else ValueError."""
    return None if cache_salt is None else check_name("cache_salt", cache_salt)


def check_salts(salts: Any) -> Any:
    """`salts` if it is a name or None, or a list of such for a batch, else ValueError."""
    for salt in salts if isinstance(salts, list) else [salts]:
        check_cache_salt(salt)
    return salts


def salt_in(headers: Any) -> str | None:
    """The salt in a request's headers (Starlette's), None without one.

    Raises ValueError for several, of which a gateway may have set only one, and for one that is empty or not ASCII.
    """
    values = headers.getlist(SALT_HEADER)
    if not values:
        return None
    if len(values) > 1:
        raise ValueError(f"{SALT_HEADER} is given twice")
    if not values[0].isascii():
        raise ValueError(f"{SALT_HEADER} must be a non-empty ASCII string")
    return check_name(SALT_HEADER, values[0])


def salt_of(cache_salt: Any, headers: Any) -> Any:
    """The salt of a request, or the salts of a batch, from its body or from the header that a gateway has set.

    Raises ValueError if they disagree, or for a bad header.
    """
    header = salt_in(headers)
    if header is None:
        return cache_salt
    salts = cache_salt if isinstance(cache_salt, list) else [cache_salt]
    if any(salt is not None and salt != header for salt in salts):
        raise ValueError(f"cache_salt and {SALT_HEADER} disagree")
    return header

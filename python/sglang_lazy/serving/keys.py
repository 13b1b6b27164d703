"""Keys of applications (`--lazy-keys`): each opens some of the server's routes, and may be bound to one tenant."""

import enum
import hashlib
import hmac
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import Request

from sglang_lazy.core.names import check_name

MIN_LENGTH, MAX_LENGTH = 16, 256
"""Characters of a key."""
SCOPE = "_lazy_scope"
"""Attribute of an endpoint: the scope that opens it."""
KEY = "sglang_lazy.key"
"""In the ASGI scope of a request: its key, if it is an application's."""


class Scope(enum.StrEnum):
    """What a key may do: list chunks; register, pin and delete them as well; send prompts; everything."""

    READ = "read"
    CHUNKS = "chunks"
    PROMPTS = "prompts"
    ADMIN = "admin"


_INCLUDED = {Scope.CHUNKS: {Scope.READ}, Scope.ADMIN: set(Scope)}


class Key(NamedTuple):
    """One key.  digest: SHA-256 of its characters.  tenant: the only cache salt that it may use, None for any."""

    digest: bytes
    scopes: frozenset[Scope]
    tenant: str | None

    def opens(self, scope: Scope) -> bool:
        """Whether it may do what `scope` names."""
        return any(scope is own or scope in _INCLUDED.get(own, ()) for own in self.scopes)


class Keys:
    """The keys of a file."""

    def __init__(self, keys: Sequence[Key]):
        self._keys = keys

    def find(self, authorization: str | None) -> Key | None:
        """The key in an `Authorization` header, as Starlette decodes it; None if it is none of these.

        It takes as long for one that is nearly right as for any other.
        """
        kind, _, secret = (authorization or "").partition(" ")
        if kind.lower() != "bearer":
            return None
        digest = hashlib.sha256(secret.encode("latin-1")).digest()
        found = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return found[0] if found else None


def opened_by(scope: Scope) -> Callable[[Callable], Callable]:
    """Decorator of an endpoint: open to keys with this scope, and to the key of SGLang's cache routes."""

    def decorated(endpoint: Callable) -> Callable:
        setattr(endpoint, SCOPE, scope)
        return endpoint

    return decorated


def sees_all_tenants(http: Request, has_admin_key: bool) -> bool:
    """Whether a request that has passed all checks of its key may see the chunks of all tenants.

    has_admin_key: whether the server has a key of its administrator's.
    """
    key: Key | None = http.scope.get(KEY)
    return has_admin_key if key is None else key.opens(Scope.ADMIN)


def read_keys(path: str, others: Collection[str | None] = ()) -> Keys:
    """The keys in a JSON file: a list of `{"key": …, "scopes": […], "tenant": …}`, where `tenant` may be missing.

    others: keys of the server's that none of these may equal. Raises ValueError, which never repeats a key.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, list) or not values:
        raise ValueError(f"{path} must hold a list of keys")
    taken = {hashlib.sha256(other.encode()).digest(): "one of SGLang's keys" for other in others if other}
    keys = []
    for index, value in enumerate(values):
        try:
            key = _parsed(value)
            if key.digest in taken:
                raise ValueError(f"it is the same as {taken[key.digest]}")
        except ValueError as error:
            raise ValueError(f"{path}: key [{index}]: {error}") from None
        taken[key.digest] = f"key [{index}]"
        keys.append(key)
    return Keys(keys)


def _parsed(value: Any) -> Key:
    if not isinstance(value, Mapping):
        raise ValueError("must be an object")
    if unknown := sorted(value.keys() - {"key", "scopes", "tenant"}):
        raise ValueError(f"unknown field {unknown[0]!r:.50}")
    secret, scopes, tenant = value.get("key"), value.get("scopes"), value.get("tenant")
    if (
        not isinstance(secret, str)
        or not MIN_LENGTH <= len(secret) <= MAX_LENGTH
        or not all("!" <= character <= "~" for character in secret)
    ):
        raise ValueError(f"key must be {MIN_LENGTH} to {MAX_LENGTH} printable ASCII characters without spaces")
    if not isinstance(scopes, list) or not scopes or any(scope not in list(Scope) for scope in scopes):
        raise ValueError(f"scopes must be a list of some of {', '.join(Scope)}")
    if tenant is not None and not check_name("tenant", tenant).isascii():
        raise ValueError("tenant must be ASCII, since it is sent in a header")
    if tenant is not None and Scope.ADMIN in scopes:
        raise ValueError("a key with the scope admin acts on all tenants, and cannot be bound to one")
    return Key(hashlib.sha256(secret.encode()).digest(), frozenset(map(Scope, scopes)), tenant)

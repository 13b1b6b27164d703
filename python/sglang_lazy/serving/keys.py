"""Keys of applications (`--lazy-keys`): each opens some of the server's routes, and may be bound to one tenant."""

import enum
import hashlib
import hmac
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fastapi import Request
from fastapi.responses import ORJSONResponse
from starlette.datastructures import Headers
from starlette.routing import Match

from sglang_lazy.core.config import SALT_HEADER
from sglang_lazy.core.names import check_name

MIN_LENGTH, MAX_LENGTH = 16, 256
"""Characters of a key."""
HIDDEN = "<redacted>"
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


def check_keys(path: str, api_key: str | None, admin_api_key: str | None, num_workers: int) -> None:
    """Raise ValueError if a file of keys cannot be used with SGLang's keys and its tokenizer workers."""
    if not admin_api_key:
        raise ValueError("--lazy-keys adds keys to a server that has --admin-api-key: without it, routes are open")
    if num_workers > 1:
        raise ValueError("--lazy-keys needs one tokenizer worker: SGLang's workers do not check keys")
    try:
        read_keys(path, (api_key, admin_api_key))
    except ValueError as error:
        raise ValueError(f"--lazy-keys {error}") from None


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


class Needed(NamedTuple):
    """What a request needs.

    scope: of an application's key.  own: the server's own key that opens the same.
    of_all_tenants: whether the answer counts all tenants together, so that no key of one opens it.
    """

    scope: Scope
    own: str
    of_all_tenants: bool = False


class Access(Protocol):
    """The server's own check of keys. Requests are given as their ASGI scopes."""

    def needed(self, scope: Any) -> Needed | None:
        """None for a request that is served without a key even where there are keys."""

    def is_unguarded(self, scope: Any) -> bool:
        """Whether the server would answer without a key what counts all tenants together."""

    def is_admins(self, authorization: str | None) -> bool:
        """Whether this header has the server's own key for everything."""


class CheckScopes:
    """A middleware around the server's own check. Requests with an application's key go on with the server's key for
    their route, and with the key's tenant in the header; all others are left to the server, but for those that it does
    not guard, which need its key for everything."""

    def __init__(self, app: Any, keys: Keys, access: Access):
        self._app, self._keys, self._access = app, keys, access

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        authorization = Headers(scope=scope).get("Authorization")
        key = self._keys.find(authorization)
        if key is None and self._access.is_unguarded(scope) and not self._access.is_admins(authorization):
            refused = ORJSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
            return await refused(scope, receive, send)
        needed = None if key is None else self._access.needed(scope)
        if key is None or needed is None:
            return await self._app(scope, receive, send)
        if reason := _refusal(key, needed, Headers(scope=scope).getlist(SALT_HEADER)):
            refused = ORJSONResponse({"error": {"message": reason}}, HTTPStatus.FORBIDDEN)
            return await refused(scope, receive, send)
        headers = {b"authorization": f"Bearer {needed.own}".encode()}
        if key.tenant is not None:
            headers[SALT_HEADER.lower().encode()] = key.tenant.encode()
        kept = [(name, value) for name, value in scope["headers"] if name not in headers]
        await self._app({**scope, "headers": [*kept, *headers.items()], KEY: key}, receive, send)


def endpoint_of(router: Any, scope: Any) -> Callable | None:
    """The endpoint that will serve a request, found as Starlette finds it; None if there is none."""
    for route in router.routes:
        match, found = route.matches(scope)
        if match is Match.FULL:
            included = getattr(route, "original_router", None)  # FastAPI's routers in a router do not tell
            return found.get("endpoint") if included is None else endpoint_of(included, scope)
    return None


def _refusal(key: Key, needed: Needed, salts: list[str]) -> str | None:
    """Why a request with this key is refused, None if it is not.  salts: those in its headers."""
    if key.tenant is not None and needed.of_all_tenants:
        return "this route counts all tenants together, and this key is bound to one"
    if not key.opens(needed.scope):
        own = ", ".join(sorted(key.scopes))
        return f"this route needs a key with the scope {needed.scope}, and this key has {own}"
    if key.tenant is not None and any(salt != key.tenant for salt in salts):
        return f"this key is bound to a tenant, and {SALT_HEADER} names another"
    return None


def without_secrets(shown: Mapping[str, Any], names: Collection[str], command: str) -> dict[str, Any]:
    """What a server shows of itself, with the values of these names hidden, also in the command line that started it.

    command: the name of that line.
    """
    secrets = {name: shown[name] for name in names if shown.get(name)}
    shown = {**shown, **dict.fromkeys(secrets, HIDDEN)}
    if isinstance(line := shown.get(command), str):
        for secret in secrets.values():
            line = re.sub(rf"(--\S+[ =]){re.escape(secret)}(?!\S)", rf"\1{HIDDEN}", line)
        shown[command] = line
    return shown

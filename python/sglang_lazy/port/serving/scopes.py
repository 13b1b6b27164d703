"""Keys of applications on the server's routes: a middleware around SGLang's own check of keys (`--admin-api-key`)."""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.utils import auth
from sglang.srt.utils.auth import AuthLevel
from starlette.datastructures import Headers
from starlette.routing import Match, Route

from sglang_lazy.core.config import SALT_HEADER, LazyConfig
from sglang_lazy.port.hooks import feature
from sglang_lazy.port.serving import frontend
from sglang_lazy.serving.keys import KEY, SCOPE, Key, Keys, Scope, read_keys
from sglang_lazy.serving.page import AskForKey

_SHOW_KEYS = (http_server.server_info, http_server.get_server_info)
"""Endpoints that SGLang opens to its --api-key although their answers contain the flags, and so all its keys."""
_METRICS, _LOADS = Route("/metrics{rest:path}", AskForKey), Route("/v1/loads", AskForKey)
"""They match SGLang's routes that count the work and the memory of all tenants together, from which one could read what
another does. SGLang serves the first one without a key. What they would call is never called."""


def close(app: Any) -> None:
    """Have SGLang ask for the key of its cache routes where a scope opens a route."""
    for route in app.router.routes:
        endpoint = getattr(route, "endpoint", None)
        if hasattr(endpoint, SCOPE):
            auth.auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


class _CheckScopes:
    """The middleware. Requests with an application's key go on with SGLang's own key for their route, and with the
    key's tenant in the header; all others are left to SGLang, but for those of metrics, which need the admin key."""

    def __init__(self, app: Any, routes: Any, keys: Keys, api_key: str | None, admin_api_key: str):
        self._app, self._routes, self._keys = app, routes, keys
        self._api_key, self._admin_api_key = api_key or "", admin_api_key

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        authorization = Headers(scope=scope).get("Authorization")
        key, is_metrics = self._keys.find(authorization), _matches(_METRICS, scope)
        if key is None and is_metrics and not self._is_admins(authorization):
            refused = ORJSONResponse({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)
            return await refused(scope, receive, send)
        if key is None or (_is_public(scope) and not is_metrics):
            return await self._app(scope, receive, send)
        endpoint = self._endpoint(scope)
        level = getattr(endpoint, "_auth_level", AuthLevel.NORMAL)
        needed = Scope.READ if is_metrics else _needed(endpoint, level)
        reason = _refusal(key, needed, Headers(scope=scope).getlist(SALT_HEADER))
        if key.tenant is not None and (is_metrics or _matches(_LOADS, scope)):
            reason = "this route counts all tenants together, and this key is bound to one"
        if reason:
            refused = ORJSONResponse({"error": {"message": reason}}, HTTPStatus.FORBIDDEN)
            return await refused(scope, receive, send)
        own = self._api_key if level == AuthLevel.NORMAL else self._admin_api_key
        headers = {b"authorization": f"Bearer {own}".encode()}
        if key.tenant is not None:
            headers[SALT_HEADER.lower().encode()] = key.tenant.encode()
        kept = [(name, value) for name, value in scope["headers"] if name not in headers]
        await self._app({**scope, "headers": [*kept, *headers.items()], KEY: key}, receive, send)

    def _endpoint(self, scope: Any) -> Callable | None:
        """The endpoint that will serve a request, found as Starlette finds it; None if there is none."""
        for route in self._routes.routes:
            match, found = route.matches(scope)
            if match is Match.FULL:
                return found.get("endpoint")
        return None

    def _is_admins(self, authorization: str | None) -> bool:
        return auth.decide_request_auth(
            method="GET",
            path="",
            authorization_header=authorization,
            api_key=None,
            admin_api_key=self._admin_api_key,
            auth_level=AuthLevel.ADMIN_FORCE,
        ).allowed


def _matches(route: Route, scope: Any) -> bool:
    return route.matches(scope)[0] is not Match.NONE


def _is_public(scope: Any) -> bool:
    """Whether SGLang serves a request without a key even if it has keys."""
    return auth.decide_request_auth(
        method=scope["method"],
        path=Request(scope).url.path,
        authorization_header=None,
        api_key="any",
        admin_api_key="any",
        auth_level=AuthLevel.NORMAL,
    ).allowed


def _needed(endpoint: Callable | None, level: AuthLevel) -> Scope:
    if (scope := getattr(endpoint, SCOPE, None)) is not None:
        return scope
    return Scope.PROMPTS if level == AuthLevel.NORMAL and endpoint not in _SHOW_KEYS else Scope.ADMIN


def _refusal(key: Key, needed: Scope, salts: list[str]) -> str | None:
    """Why a request with this key is refused, None if it is not.  salts: those in its headers."""
    if not key.opens(needed):
        return f"this route needs a key with the scope {needed}, and this key has {', '.join(sorted(key.scopes))}"
    if key.tenant is not None and any(salt != key.tenant for salt in salts):
        return f"this key is bound to a tenant, and {SALT_HEADER} names another"
    return None


def add_middleware(_result: Any, app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
    """After `add_api_key_middleware`: have the page ask for the key, and check the scopes of keys in a file."""
    app.add_middleware(AskForKey)
    if path := frontend.current().config.keys:
        assert admin_api_key, "check_keys has seen it"
        keys = read_keys(path, (api_key, admin_api_key))
        app.add_middleware(_CheckScopes, routes=app.router, keys=keys, api_key=api_key, admin_api_key=admin_api_key)


def check_keys(config: LazyConfig, flags: Any) -> None:
    """Raise ValueError if the file of keys cannot be used with SGLang's flags."""
    if not config.keys:
        return
    if not flags.admin_api_key:
        raise ValueError("--lazy-keys adds keys to a server that has --admin-api-key: without it, routes are open")
    if flags.tokenizer_worker_num > 1:
        raise ValueError("--lazy-keys needs one tokenizer worker: SGLang's workers do not check keys")
    try:
        read_keys(config.keys, (flags.api_key, flags.admin_api_key))
    except ValueError as error:
        raise ValueError(f"--lazy-keys {error}") from None


HOOKS = (
    feature(
        "sglang.srt.utils.auth.add_api_key_middleware",
        add_middleware,
        "AFTER",
        "the page of chunks asks for a key, and keys of applications have scopes",
    ),
)

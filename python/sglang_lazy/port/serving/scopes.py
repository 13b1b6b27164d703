"""Keys of applications on SGLang's routes, around its own check of keys (`--admin-api-key`)."""

from typing import Any, NamedTuple

from fastapi import Request
from sglang.srt.entrypoints import http_server
from sglang.srt.utils import auth
from sglang.srt.utils.auth import AuthLevel
from starlette.routing import Match, Route

from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.serving import frontend
from sglang_lazy.serving.keys import SCOPE, CheckScopes, Needed, Scope, endpoint_of, read_keys
from sglang_lazy.serving.page import AskForKey

_SHOW_KEYS = (http_server.server_info, http_server.get_server_info)
"""Endpoints that SGLang opens to its --api-key although their answers contain the flags, and so all its keys."""
_METRICS, _LOADS = Route("/metrics{rest:path}", AskForKey), Route("/v1/loads", AskForKey)
"""They match SGLang's routes that count the work and the memory of all tenants together, from which one could read what
another does. SGLang serves the first one without a key. What they would call is never called."""
HOOKS = Hooks()


def close(app: Any) -> None:
    """Have SGLang ask for the key of its cache routes where a scope opens a route."""
    for route in app.router.routes:
        endpoint = getattr(route, "endpoint", None)
        if hasattr(endpoint, SCOPE):
            auth.auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


class _Access(NamedTuple):
    """SGLang's check of keys, as `CheckScopes` knows it."""

    router: Any
    api_key: str
    admin_api_key: str

    def is_unguarded(self, scope: Any) -> bool:
        return _matches(_METRICS, scope)

    def is_admins(self, authorization: str | None) -> bool:
        return auth.decide_request_auth(
            method="GET",
            path="",
            authorization_header=authorization,
            api_key=None,
            admin_api_key=self.admin_api_key,
            auth_level=AuthLevel.ADMIN_FORCE,
        ).allowed

    def needed(self, scope: Any) -> Needed | None:
        endpoint = endpoint_of(self.router, scope)
        level = getattr(endpoint, "_auth_level", AuthLevel.NORMAL)
        # SGLang asks for the key of another level where a router in its router has the endpoint.
        asked = auth._get_auth_level_from_app_and_scope(self.router, scope)
        own = self.api_key if asked == AuthLevel.NORMAL else self.admin_api_key
        if self.is_unguarded(scope):
            return Needed(Scope.READ, own, of_all_tenants=True)
        if _is_public(scope):
            return None
        if (opened_by := getattr(endpoint, SCOPE, None)) is not None:
            return Needed(opened_by, own)
        is_for_prompts = level == AuthLevel.NORMAL and endpoint not in _SHOW_KEYS
        return Needed(Scope.PROMPTS if is_for_prompts else Scope.ADMIN, own, of_all_tenants=_matches(_LOADS, scope))


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


@HOOKS.on("sglang.srt.utils.auth").feature(
    "add_api_key_middleware", "AFTER", "the page of chunks asks for a key, and keys of applications have scopes"
)
def add_middleware(_result: Any, app: Any, *, api_key: str | None, admin_api_key: str | None) -> None:
    """Have the page ask for the key, and check the scopes of keys in a file."""
    app.add_middleware(AskForKey)
    if path := frontend.current().config.keys:
        assert admin_api_key, "check_keys has seen it"
        keys = read_keys(path, (api_key, admin_api_key))
        app.add_middleware(CheckScopes, keys=keys, access=_Access(app.router, api_key or "", admin_api_key))

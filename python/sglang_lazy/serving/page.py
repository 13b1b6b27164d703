"""`/lazy`, the dashboard: a static page, built from the files in `web`, that gets its numbers from the chunk routes."""

import base64
import hashlib
import importlib.resources
from http import HTTPStatus
from typing import Any

from fastapi.responses import HTMLResponse

from sglang_lazy.serving.keys import Scope, opened_by

PAGE_ROUTE = "/lazy"


def _read(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("web", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The source expression of a content security policy that allows this script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# One script, so that one hash allows it; its parts share one scope, and use each other once all are read.
_PARTS = (
    "elements.js",
    "address.js",
    "format.js",
    "server.js",
    "overview.js",
    "chunk.js",
    "why.js",
    "list.js",
    "events.js",
)
_STYLE, _SCRIPT = _read("page.css"), "\n".join(['"use strict";', *map(_read, _PARTS)])
_PAGE = (
    _read("page.html")
    .replace("<style></style>", f"<style>{_STYLE}</style>")
    .replace("<script></script>", f"<script>{_SCRIPT}</script>")
)
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src {_digest(_SCRIPT)}; style-src {_digest(_STYLE)}; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _page(status: HTTPStatus) -> HTMLResponse:
    return HTMLResponse(_PAGE, status, _HEADERS)


@opened_by(Scope.READ)
async def page() -> HTMLResponse:
    """The page. Its numbers come from other routes; it asks for the key if these need one."""
    return _page(HTTPStatus.OK)


def add_route(app: Any) -> None:
    """Add the route, once."""
    if not any(getattr(route, "path", None) == PAGE_ROUTE for route in app.router.routes):
        app.get(PAGE_ROUTE, include_in_schema=False)(page)


class AskForKey:
    """Middleware around a check of keys, which a browser opening the page cannot pass: the 401's body is the
    page, which is not secret and asks for the key."""

    def __init__(self, app: Any):
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("GET", PAGE_ROUTE):
            return await self._app(scope, receive, send)
        refused = False

        async def send_page(message: Any) -> None:
            nonlocal refused
            if message.get("status") == HTTPStatus.UNAUTHORIZED:
                refused = True
                await _page(HTTPStatus.UNAUTHORIZED)(scope, receive, send)
            elif not refused:
                await send(message)

        await self._app(scope, receive, send_page)

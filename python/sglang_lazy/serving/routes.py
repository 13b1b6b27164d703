"""Endpoints of ours in place of SGLang's."""

from collections.abc import Callable
from typing import Any


def replace_route(app: Any, path: str, endpoint: Callable) -> None:
    """Replace the endpoint of `path`; everything else about its route stays."""
    routes = app.router.routes
    index = next(index for index, route in enumerate(routes) if getattr(route, "path", None) == path)
    stock = routes[index]
    if stock.endpoint is endpoint:
        return
    routes[index] = type(stock)(
        path,
        endpoint,
        methods=stock.methods,
        name=stock.name,
        response_class=stock.response_class,
        dependencies=stock.dependencies,
    )

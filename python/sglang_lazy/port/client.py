"""The hook on the client of SGLang's frontend language."""

import functools
from collections.abc import Callable
from typing import Any

from sglang.lang.backend import runtime_endpoint


def hook_http_request(send: Callable[..., Any]) -> None:
    """From now on, requests of `RuntimeEndpoint` go through `send(http_request, url, json, **kwargs)`; done once."""
    stock = runtime_endpoint.http_request
    if getattr(stock, "send", None) is send:
        return

    @functools.wraps(stock)
    def http_request(*args: Any, **kwargs: Any) -> Any:
        return send(stock, *args, **kwargs)

    http_request.send = send  # type: ignore[attr-defined]
    runtime_endpoint.http_request = http_request

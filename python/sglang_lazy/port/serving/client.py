"""The hook on SGLang's frontend language."""

from collections.abc import Callable

from sglang_lazy.port.hooks import apply, feature


def hook_http_request(send: Callable) -> None:
    """Call `send(stock, url, json, …)` around the requests that `RuntimeEndpoint` sends. Hooks only once."""
    apply(
        (
            feature(
                "sglang.lang.backend.runtime_endpoint.http_request",
                send,
                "AROUND",
                "errors of a server reach the frontend language",
            ),
        )
    )

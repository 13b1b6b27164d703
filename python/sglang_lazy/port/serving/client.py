"""The hook on SGLang's frontend language."""

from collections.abc import Callable

from sglang_lazy.port.hooks import Hook, apply


def hook_http_request(send: Callable) -> None:
    """Call `send(stock, url, json, …)` around the requests that `RuntimeEndpoint` sends. Hooks only once."""
    apply((Hook("sglang.lang.backend.runtime_endpoint.http_request", send, "AROUND"),))

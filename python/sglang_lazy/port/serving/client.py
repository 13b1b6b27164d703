"""The one hook on SGLang's frontend language."""

from collections.abc import Callable

from sglang_lazy.port.hooks import Hook, apply


def hook_http_request(send: Callable) -> None:
    """Have `send(stock, url, json, …)` called around the requests that `RuntimeEndpoint` sends; once."""
    apply((Hook("sglang.lang.backend.runtime_endpoint.http_request", send, "AROUND"),))

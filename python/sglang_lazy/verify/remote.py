"""A running server with the interface of an engine."""

from typing import Any

import requests
import urllib3

from sglang_lazy.core.config import INFO_ROUTE
from sglang_lazy.verify.cost import Generate


def connect(url: str, api_key: str | None = None, timeout: float = 600) -> Generate:
    """A function that takes the fields of `/generate` and returns the results of the server at `url`.

    timeout: seconds for one call. Raises ValueError, here and in calls, if the server cannot be reached, does not
    understand chunks or refuses a request.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the URL of a server begins with http:// or https://, got {url!r}")
    session = requests.Session()
    if api_key is not None:
        session.headers["Authorization"] = f"Bearer {api_key}"

    def call(method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        try:
            return session.request(method, url.rstrip("/") + path, json=body, timeout=timeout)
        except requests.RequestException as error:
            raise ValueError(no_answer(url, error)) from None

    def generate(**fields: Any) -> Any:
        response = call("POST", "/generate", fields)
        if response.status_code == 400:  # an engine would raise the same
            raise ValueError(_reason(response))
        if not response.ok:
            raise ValueError(f"{url} answered {response.status_code}: {response.text[:500]}")
        return response.json()

    info = call("GET", INFO_ROUTE)
    if not info.ok:
        raise ValueError(f"{url}{INFO_ROUTE} answered {info.status_code}: is it a server of sglang_lazy.launch_server?")
    return generate


def _reason(response: requests.Response) -> str:
    """The message in a refusal of the server; the beginning of any other text."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:500]


def no_answer(url: str, error: requests.RequestException) -> str:
    """A sentence about a server that does not answer, with its URL, and what to do about `error`."""
    if isinstance(error, requests.Timeout):
        return f"{url} has not answered in time: the server is busy or hangs, of which its log may say more"
    if isinstance(error, requests.exceptions.SSLError):
        return f"{url} has no TLS certificate to trust: a server without --ssl-certfile is at http://"
    if isinstance(error, requests.ConnectionError) and isinstance(error.args[0], urllib3.exceptions.MaxRetryError):
        return f"no server answers at {url}: start one with sglang-lazy serve, or correct the URL"
    if isinstance(error, requests.ConnectionError | requests.exceptions.ChunkedEncodingError):
        return f"{url} has broken off: the end of the server's log says why"
    return f"no answer from {url}: {error}"

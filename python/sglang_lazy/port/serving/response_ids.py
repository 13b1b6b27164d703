"""Stored responses, which SGLang gives to whoever knows an id: here an id is valid only with the salt that it was made
for."""

import functools
import hmac
import secrets
import uuid
from typing import Any

from fastapi import Request
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints import http_server

from sglang_lazy.serving.salts import check_cache_salt, salt_of

_PREFIX = "resp_"
_NAME_LEN = 32


def new_id(salt: str | None) -> str:
    """The id of a new response to a tenant."""
    name = uuid.uuid4().hex
    return f"{_PREFIX}{name}{_signature(name, salt)}"


def is_of(salt: str | None, response_id: str) -> bool:
    """Whether this id was made for this tenant."""
    name = response_id.removeprefix(_PREFIX)[:_NAME_LEN]
    return hmac.compare_digest(f"{_PREFIX}{name}{_signature(name, salt)}".encode(), response_id.encode())


def _signature(name: str, salt: str | None) -> str:
    owner = "" if salt is None else f"/{salt}"
    return hmac.digest(_secret(), f"{name}{owner}".encode(), "sha256").hex()[:_NAME_LEN]


@functools.cache
def _secret() -> bytes:
    return secrets.token_bytes(32)


def take_ids(serving: Any, request: Any) -> ORJSONResponse | None:
    """Give a request its id. Returns the answer for an unknown response if it follows another tenant's.

    Raises ValueError if the client has chosen an id of a stored response.
    """
    if "request_id" not in request.model_fields_set:
        request.request_id = new_id(request.cache_salt)
    elif request.request_id.startswith(_PREFIX):
        raise ValueError(f"request_id: ids that begin with {_PREFIX} are the server's")
    return _not_found(serving, request.previous_response_id, request.cache_salt)


def _not_found(serving: Any, response_id: str | None, salt: str | None) -> ORJSONResponse | None:
    if response_id is None or not response_id.startswith(_PREFIX) or is_of(salt, response_id):
        return None  # SGLang refuses ids without the prefix
    return serving._make_not_found_error(response_id)


async def retrieve(response_id: str, raw_request: Request, cache_salt: str | None = None) -> Any:
    """Retrieve a response by ID."""
    return await _owned(http_server.v1_retrieve_responses, response_id, raw_request, cache_salt)


async def cancel(response_id: str, raw_request: Request, cache_salt: str | None = None) -> Any:
    """Cancel a background response."""
    return await _owned(http_server.v1_cancel_responses, response_id, raw_request, cache_salt)


async def _owned(endpoint: Any, response_id: str, raw_request: Request, cache_salt: str | None) -> Any:
    serving = raw_request.app.state.openai_serving_responses
    try:
        salt = check_cache_salt(salt_of(cache_salt, raw_request.headers))
    except ValueError as error:
        return serving.create_error_response(str(error))
    return _not_found(serving, response_id, salt) or await endpoint(response_id, raw_request)

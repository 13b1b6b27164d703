"""Bodies of requests as clients sent them, before SGLang drops what it does not know; and answers to invalid ones."""

import dataclasses
import functools
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse
from pydantic import BaseModel
from sglang.srt.entrypoints import http_server

from sglang_lazy.port.serving.server_fields import refuse_server_fields
from sglang_lazy.serving.fields import FIELDS, check_fields
from sglang_lazy.serving.validation import the_one


async def check_body(request: Request, kind: type) -> None:
    """Raise ValueError for a field that is the server's, or one of ours that the route would ignore.

    kind: the class of the route's bodies.
    """
    body = await request.json()  # read already, and kept
    if not isinstance(body, Mapping):
        return
    check_fields(body, _fields_of(kind))
    if isinstance(extra := body.get("extra_body"), Mapping) and any(name in FIELDS for name in extra):
        raise ValueError("extra_body is an argument of OpenAI's client: in JSON, its fields are those of the body")
    for fields in (body, body.get("parameters")):  # as Vertex AI calls those of `/generate`
        if isinstance(fields, Mapping):
            refuse_server_fields(fields, http_server.get_global_state().tokenizer_manager.server_args)


@functools.cache
def _fields_of(kind: Any) -> frozenset[str]:
    if issubclass(kind, BaseModel):
        return frozenset(kind.model_fields)
    if issubclass(kind, msgspec.Struct):
        return frozenset(kind.__struct_fields__)
    return frozenset(field.name for field in dataclasses.fields(kind))


async def refuse_invalid(request: Request, error: Exception) -> Response:
    """A 400 with the one error that matters, in the form of each API: SGLang's answer to a body that its route's model
    refuses names its source files and repeats the body.  error: a RequestValidationError."""
    assert isinstance(error, RequestValidationError)
    message, status = the_one(error.errors()), HTTPStatus.BAD_REQUEST
    if request.url.path.startswith("/v1/messages"):
        return http_server._anthropic_error_response(
            status_code=status.value, error_type="invalid_request_error", message=message
        )
    content = {"message": message, "type": status.phrase, "param": None, "code": status.value}
    in_responses = request.url.path.startswith("/v1/responses")
    return ORJSONResponse({"error": content} if in_responses else {"object": "error", **content}, status)

"""The answer to a request that its route's model refuses. SGLang's names its source files and repeats the body."""

from http import HTTPStatus

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints import http_server

from sglang_lazy.serving.validation import the_one


async def refuse(request: Request, error: Exception) -> Response:
    """A 400 with the one error that matters, in the form of each API.  error: a RequestValidationError."""
    assert isinstance(error, RequestValidationError)
    message, status = the_one(error.errors()), HTTPStatus.BAD_REQUEST
    if request.url.path.startswith("/v1/messages"):
        return http_server._anthropic_error_response(
            status_code=status.value, error_type="invalid_request_error", message=message
        )
    content = {"message": message, "type": status.phrase, "param": None, "code": status.value}
    in_responses = request.url.path.startswith("/v1/responses")
    return ORJSONResponse({"error": content} if in_responses else {"object": "error", **content}, status)

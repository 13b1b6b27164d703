"""SGLang's own routes that answer malformed requests with a 500, or break off a stream: make them answer with a 400."""

import functools
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from fastapi.responses import ORJSONResponse, StreamingResponse
from sglang.srt.entrypoints import http_server

from sglang_lazy.port.serving.malformed import reading


def refusing(endpoint: Callable) -> Callable:
    """`endpoint`, answering requests that it cannot read with a 400. A stream begins only with its first event."""

    @functools.wraps(endpoint)
    async def read(*args: Any, **kwargs: Any) -> Any:
        try:
            with reading():
                response = await endpoint(*args, **kwargs)
                if isinstance(response, StreamingResponse):
                    events: Any = response.body_iterator
                    response.body_iterator = _resume(await anext(events, b""), events)
        except ValueError as error:
            return ORJSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
        return response

    return read


async def _resume(first: bytes, events: AsyncIterator) -> AsyncIterator:
    yield first
    async for event in events:
        yield event


REFUSING = {
    endpoint: refusing(endpoint)
    for endpoint in (
        http_server.ollama_chat,
        http_server.ollama_generate,
        http_server.parse_function_call_request,
        http_server.separate_reasoning_request,
        http_server.vertex_generate,
    )
}
"""By SGLang's endpoint, its replacement. None of these endpoints takes chunks."""

"""SGLang's own routes without chunks: answer malformed requests, which lead to a 500 or break off a stream, with a 400,
and refuse fields that they would ignore."""

import functools
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request
from fastapi.responses import ORJSONResponse, StreamingResponse
from sglang.srt.entrypoints import http_server

from sglang_lazy.port.serving.bodies import check_body
from sglang_lazy.port.serving.malformed import reading


def refusing(endpoint: Callable) -> Callable:
    """`endpoint`, answering requests that it cannot read with a 400. A stream begins only with its first event."""

    @functools.wraps(endpoint)
    async def read(**parameters: Any) -> Any:
        try:
            with reading():
                await _check_body(parameters)
                response = await endpoint(**parameters)
                if isinstance(response, StreamingResponse):
                    events: Any = response.body_iterator
                    response.body_iterator = _resume(await anext(events, b""), events)
        except ValueError as error:
            return ORJSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
        return response

    return read


async def _check_body(parameters: dict[str, Any]) -> None:
    request = next(value for value in parameters.values() if isinstance(value, Request))
    (body,) = (value for value in parameters.values() if value is not request)
    await check_body(request, type(body))


async def _resume(first: bytes, events: AsyncIterator) -> AsyncIterator:
    yield first
    async for event in events:
        yield event


REFUSING = {
    endpoint: refusing(endpoint)
    for endpoint in (
        http_server.classify_request,
        http_server.encode_request,
        http_server.ollama_chat,
        http_server.ollama_generate,
        http_server.openai_v1_classify,
        http_server.openai_v1_embeddings,
        http_server.openai_v1_tokenize,
        http_server.parse_function_call_request,
        http_server.separate_reasoning_request,
        http_server.v1_rerank_request,
        http_server.v1_score_request,
        http_server.vertex_generate,
    )
}
"""By SGLang's endpoint, its replacement. None of these endpoints takes chunks."""

"""HTTP: `segments` in `/generate`, chunk parts in `/v1/chat/completions`, and `/lazy_info`."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.responses import ORJSONResponse, StreamingResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.lang.language import INFO_ROUTE
from sglang_lazy.serving.chat import ChatRequest
from sglang_lazy.serving.requests import refuse_without_chunks, to_generate_args
from sglang_lazy.serving.results import REQUEST_SENT, extend_protocol


@dataclasses.dataclass
class GenerateRequest(GenerateReqInput):
    """SGLang's `/generate` body with a prompt, or a batch of prompts, made of segments."""

    segments: Any = None
    salt: Any = None
    link: Any = None


async def generate(obj: GenerateRequest, request: Request) -> Response:
    """Handle a generate request."""
    plain = _plain(obj)
    try:
        if obj.segments is not None:
            _take_segments(plain, obj)
        else:
            refuse_without_chunks(obj.salt, obj.link, "segments")
    except ValueError as error:
        return ORJSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
    response = await http_server.generate_request(plain, request)
    return await fail_before_stream(response) if obj.segments is not None else response


def _plain(obj: GenerateRequest) -> GenerateReqInput:
    """`obj` as SGLang's own request; a copy field by field would be most of what we cost prompts without chunks."""
    plain = GenerateReqInput.__new__(GenerateReqInput)
    vars(plain).update(vars(obj))
    for field in ("segments", "salt", "link"):
        delattr(plain, field)
    return plain


def _take_segments(plain: GenerateReqInput, obj: GenerateRequest) -> None:
    for field in ("text", "input_ids", "input_embeds"):
        if getattr(obj, field) is not None:
            raise ValueError(f"both segments and {field} are given: a prompt is one or the other")
    manager = http_server.get_global_state().tokenizer_manager
    for field, value in to_generate_args(manager, obj.segments, obj.salt, obj.sampling_params, obj.link).items():
        setattr(plain, field, value)


async def chat(request: ChatRequest, raw_request: Request) -> Any:
    """OpenAI-compatible chat completion endpoint."""
    response = await raw_request.app.state.openai_serving_chat.handle_request(request, raw_request)
    return await fail_before_stream(response) if request.has_chunks else response


async def lazy_info() -> dict[str, Any]:
    """What this server was asked for; its presence tells clients that chunks are understood."""
    return {"config": dataclasses.asdict(LazyConfig.from_env() or LazyConfig())}


async def fail_before_stream(response: Any) -> Any:
    """`response`, unless it is a stream that fails before its request goes to the scheduler: that is answered with its
    HTTP status. Those of batches and of several samples are watched up to their first event.

    The head of a stream is held back no longer, since a client takes half a millisecond to read it.
    """
    if not isinstance(response, StreamingResponse):
        return response
    events, sent = response.body_iterator, asyncio.get_running_loop().create_future()
    REQUEST_SENT.set(sent)
    first = asyncio.ensure_future(anext(events, None))
    try:
        await asyncio.wait((first, sent), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        first.cancel()
        raise
    if first.done():
        if first.result() is None:  # the client went away
            return Response(status_code=499)
        error = _error_in(first.result())
        if error is not None:
            await events.aclose()
            status = error.get("code") if isinstance(error.get("code"), int) else HTTPStatus.BAD_REQUEST
            return ORJSONResponse({"error": error}, status_code=status)
    response.body_iterator = _resume(first, events)
    return response


def _error_in(event: bytes | str) -> dict[str, Any] | None:
    payload = event.decode() if isinstance(event, bytes) else event
    payload = payload.removeprefix("data:").strip()
    if not payload.startswith('{"error"'):
        return None
    return json.loads(payload)["error"]


async def _resume(first: asyncio.Future, events: AsyncIterator) -> AsyncIterator:
    event = await first
    if event is not None:
        yield event
    async for event in events:
        yield event


def install_routes(result: Any = None, global_state: Any = None) -> None:
    """Hook after `http_server.set_global_state`: serve our endpoints in place of the stock ones."""
    extend_protocol()
    app = http_server.app
    for path, endpoint in (("/generate", generate), ("/v1/chat/completions", chat), ("/invocations", chat)):
        _replace_route(app, path, endpoint)
    if not any(getattr(route, "path", None) == INFO_ROUTE for route in app.router.routes):
        app.get(INFO_ROUTE)(lazy_info)
    app.openapi_schema = None


def _replace_route(app: Any, path: str, endpoint: Callable) -> None:
    """Serve `path` by `endpoint`, everything else about its route as before."""
    routes = app.router.routes
    index = next(index for index, route in enumerate(routes) if getattr(route, "path", None) == path)
    stock = routes[index]
    if stock.endpoint is endpoint:
        return
    routes[index] = type(stock)(
        path,
        endpoint,
        methods=stock.methods,
        name=stock.name,
        response_class=stock.response_class,
        dependencies=stock.dependencies,
    )

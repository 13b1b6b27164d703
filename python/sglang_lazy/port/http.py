"""HTTP: `segments` in `/generate` and `/v1/completions`, chunk parts in `/v1/chat/completions`, and `/lazy_info`."""

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

from sglang_lazy.core.config import INFO_ROUTE, LazyConfig
from sglang_lazy.port.chat import ChatRequest
from sglang_lazy.port.completions import CompletionsRequest
from sglang_lazy.port.protocol import extend_protocol
from sglang_lazy.port.sampling import check_sampling_params
from sglang_lazy.port.tokenizer_manager import REQUEST_SENT
from sglang_lazy.serving.requests import refuse_salt, refuse_without_segments, to_generate_args


@dataclasses.dataclass
class GenerateRequest(GenerateReqInput):
    """SGLang's `/generate` body with a prompt, or a batch of prompts, made of segments."""

    segments: Any = None
    cache_salt: Any = None
    link: Any = None


_OURS = tuple(field.name for field in dataclasses.fields(GenerateRequest)[len(dataclasses.fields(GenerateReqInput)) :])


async def generate(obj: GenerateRequest, request: Request) -> Response:
    """Handle a generate request."""
    plain = _plain(obj)
    try:
        check_sampling_params(obj.sampling_params)
        if obj.segments is None:
            refuse_without_segments(obj.cache_salt, obj.link)
        else:
            refuse_salt(await request.json())
            _take_segments(plain, obj)
    except ValueError as error:
        return ORJSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)
    response = await http_server.generate_request(plain, request)
    return await fail_before_stream(response) if obj.segments is not None else response


def _plain(obj: GenerateRequest) -> GenerateReqInput:
    """`obj` as SGLang's own request. Not copied field by field: that would slow down prompts without chunks."""
    plain = GenerateReqInput.__new__(GenerateReqInput)
    vars(plain).update(vars(obj))
    for field in _OURS:
        delattr(plain, field)
    return plain


def _take_segments(plain: GenerateReqInput, obj: GenerateRequest) -> None:
    for field in ("text", "input_ids", "input_embeds"):
        if getattr(obj, field) is not None:
            raise ValueError(f"both segments and {field} are given: a prompt is one or the other")
    manager = http_server.get_global_state().tokenizer_manager
    args = to_generate_args(manager, obj.segments, obj.cache_salt, obj.sampling_params, obj.link)
    for field, value in args.items():
        setattr(plain, field, value)


async def chat(request: ChatRequest, raw_request: Request) -> Any:
    """OpenAI-compatible chat completion endpoint."""
    response = await raw_request.app.state.openai_serving_chat.handle_request(request, raw_request)
    return await fail_before_stream(response) if request.has_chunks else response


async def completions(request: CompletionsRequest, raw_request: Request) -> Any:
    """OpenAI-compatible text completion endpoint."""
    return await raw_request.app.state.openai_serving_completion.handle_request(request, raw_request)


async def lazy_info() -> dict[str, Any]:
    """The server's configuration. Only servers that understand chunks have this route."""
    return {"config": dataclasses.asdict(LazyConfig.current())}


async def fail_before_stream(response: Any) -> Any:
    """`response`, or an error with its HTTP status for a stream that fails before its request reaches the scheduler.

    Streams of batches and of several samples are watched up to their first event. The head of any other stream goes out
    as soon as the request has been sent: a client takes half a millisecond to read it.
    """
    if not isinstance(response, StreamingResponse):
        return response
    events: Any = response.body_iterator
    sent = asyncio.get_running_loop().create_future()
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
            code = error.get("code")
            status = code if isinstance(code, int) else HTTPStatus.BAD_REQUEST
            return ORJSONResponse({"error": error}, status_code=status)
    response.body_iterator = _resume(first, events)
    return response


def _error_in(event: Any) -> dict[str, Any] | None:
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
    """After `http_server.set_global_state`: serve our endpoints in place of SGLang's."""
    extend_protocol()
    app = http_server.app
    _replace_route(app, "/generate", generate)
    _replace_route(app, "/v1/completions", completions)
    for path in ("/v1/chat/completions", "/invocations"):
        _replace_route(app, path, chat)
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

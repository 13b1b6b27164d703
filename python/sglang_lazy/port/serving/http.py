"""HTTP endpoints: SGLang's routes with prompts that have chunks."""

import copy
import dataclasses
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_lazy.core.segments import ChunkLimit
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.repairs.scheduler import OperationError
from sglang_lazy.port.serving import frontend, scopes
from sglang_lazy.port.serving.chat import ChatRequest
from sglang_lazy.port.serving.completions import CompletionsRequest
from sglang_lazy.port.serving.malformed import REFUSING, check_body, convert_sampling_params, refuse_invalid
from sglang_lazy.port.serving.messages import CountRequest, MessagesRequest, Refused, converting_ahead
from sglang_lazy.port.serving.responses import ResponsesRequest, cancel, retrieve, take_ids
from sglang_lazy.port.serving.usage import extend_protocol
from sglang_lazy.serving import chunk_routes, page
from sglang_lazy.serving.known_chunks import UnknownChunk, with_tokens
from sglang_lazy.serving.prompts import refuse_without_segments
from sglang_lazy.serving.routes import replace_route
from sglang_lazy.serving.salts import check_salts, salt_of
from sglang_lazy.serving.shadow import measured_shadow
from sglang_lazy.serving.streams import fail_before_stream
from sglang_lazy.serving.text import check_separator, segments_in
from sglang_lazy.serving.threads import LARGE, Outcome, finished, in_thread
from sglang_lazy.serving.validation import told

HOOKS = Hooks()


@dataclasses.dataclass
class GenerateRequest(GenerateReqInput):
    """SGLang's `/generate` body with a prompt, or a batch of prompts, of segments."""

    segments: Any = None
    cache_salt: Any = None  # null for some prompts of a batch
    link: Any = None
    chunk_separator: str | None = None


_OURS = tuple(field.name for field in dataclasses.fields(GenerateRequest)[len(dataclasses.fields(GenerateReqInput)) :])


async def generate(obj: GenerateRequest, request: Request) -> Response:
    """Handle a generate request."""
    plain, prompts = _plain(obj), frontend.current().prompts
    separator, limit = prompts.separator(obj.chunk_separator), prompts.limit(obj.link)
    try:
        await check_body(request, GenerateRequest)
        obj.sampling_params = plain.sampling_params = convert_sampling_params(obj.sampling_params)
        obj.cache_salt = plain.cache_salt = check_salts(salt_of(obj.cache_salt, request.headers))
        check_separator(obj.chunk_separator, obj.text)
        if obj.segments is None:
            obj.segments = segments_in(obj.text, separator, limit)
            plain.text = plain.text if obj.segments is None else None
        elif obj.text is not None:
            raise ValueError("both segments and text are given: a prompt is one or the other")
        if obj.segments is None:
            refuse_without_segments(None if separator else obj.link)
        else:
            await in_thread(len(await request.body()), _take_segments, plain, obj, limit)
    except ValueError as error:
        return ORJSONResponse({"error": {"message": str(error)}}, status_code=_status(error))
    if obj.segments is None:
        return await http_server.generate_request(plain, request)
    return await fail_before_stream(await http_server.serve_generate_request(plain, request))


def _plain(obj: GenerateRequest) -> GenerateReqInput:
    """`obj` as SGLang's own request. Copying field by field would slow down prompts without chunks."""
    plain = GenerateReqInput.__new__(GenerateReqInput)
    vars(plain).update(vars(obj))
    for field in _OURS:
        delattr(plain, field)
    return plain


def _take_segments(plain: GenerateReqInput, obj: GenerateRequest, limit: ChunkLimit) -> None:
    for field in ("input_ids", "input_embeds"):
        if getattr(obj, field) is not None:
            raise ValueError(f"both segments and {field} are given: a prompt is one or the other")
    this = frontend.current()
    segments = with_tokens(this.known, obj.segments, obj.cache_salt, limit=limit)
    args = this.prompts.to_generate_args(segments, obj.cache_salt, obj.sampling_params, obj.link)
    plain.cache_salt = None  # the layout carries it
    for field, value in args.items():
        setattr(plain, field, value)


def _status(error: ValueError) -> HTTPStatus:
    return HTTPStatus.NOT_FOUND if isinstance(error, UnknownChunk) else HTTPStatus.BAD_REQUEST


async def _read(request: Any, raw_request: Request) -> None:
    await check_body(raw_request, type(request))
    await in_thread(len(await raw_request.body()), _take_salt, request, raw_request)


def _take_salt(request: Any, raw_request: Request) -> None:
    """Put the header's salt into the request, and replace chunk ids by tokens.

    Raises ValueError if the body names another salt, UnknownChunk for an id that the tenant has not registered.
    """
    request.cache_salt = salt_of(request.cache_salt, raw_request.headers)
    this = frontend.current()
    if isinstance(request, CompletionsRequest):
        limit = this.prompts.limit(request.link)
        request.segments = with_tokens(this.known, request.segments, request.cache_salt, limit=limit)
    else:
        parts = request._chunk_parts
        parts.parts = with_tokens(this.known, parts.parts, request.cache_salt, parts.names, parts.limit)


async def _answer(serving: Any, request: Any, raw_request: Request) -> Any:
    """Have SGLang's object that serves chats or completions answer a request. If that is large, it is converted in a
    thread, and a copy of the object has its conversion."""
    try:
        await _read(request, raw_request)
    except ValueError as error:
        return serving.create_error_response(str(error), status_code=_status(error))
    if (size := len(await raw_request.body())) >= LARGE:
        convert, serving = serving._convert_to_internal_request, copy.copy(serving)
        serving._convert_to_internal_request = await in_thread(size, Outcome, convert, request, raw_request)
    return await serving.handle_request(request, raw_request)


async def chat(request: ChatRequest, raw_request: Request) -> Any:
    """OpenAI-compatible chat completion endpoint."""
    response = await _answer(raw_request.app.state.openai_serving_chat, request, raw_request)
    return await fail_before_stream(response) if request.has_chunks else response


async def completions(request: CompletionsRequest, raw_request: Request) -> Any:
    """OpenAI-compatible text completion endpoint."""
    return await _answer(raw_request.app.state.openai_serving_completion, request, raw_request)


async def responses(request: ResponsesRequest, raw_request: Request) -> Any:
    """Endpoint for the responses API with reasoning support."""
    serving = raw_request.app.state.openai_serving_responses
    try:
        await _read(request, raw_request)
        if request.has_chunks and serving.use_harmony:
            raise ValueError("this model's chat encoding does not support chunk parts")
        if (unknown := take_ids(serving, request)) is not None:
            return unknown
    except ValueError as error:
        return serving.create_error_response(str(error), status_code=_status(error))
    request._size = len(await raw_request.body())
    response = await http_server.v1_responses_request(request, raw_request)
    return await fail_before_stream(response, serving.create_error_response) if request.has_chunks else response


def _refuse_message(reason: str, status: HTTPStatus = HTTPStatus.BAD_REQUEST) -> Response:
    kind = "not_found_error" if status == HTTPStatus.NOT_FOUND else "invalid_request_error"
    return http_server._anthropic_error_response(status_code=status, error_type=kind, message=reason)


async def messages(request: MessagesRequest, raw_request: Request) -> Any:
    """Anthropic-compatible Messages API endpoint."""
    serving = raw_request.app.state.anthropic_serving
    try:
        await _read(request, raw_request)
        if (size := len(await raw_request.body())) >= LARGE:
            serving = await in_thread(size, converting_ahead, serving, request, raw_request)
        response = await serving.handle_messages(request, raw_request)
    except ValueError as error:
        return _refuse_message(told(error), _status(error))
    except Refused as error:
        return _refuse_message(str(error))
    return await fail_before_stream(response, _refuse_message) if request.has_chunks else response


async def count_tokens(request: CountRequest, raw_request: Request) -> Any:
    """Anthropic-compatible token counting endpoint."""
    try:
        await check_body(raw_request, CountRequest)
    except ValueError as error:
        return _refuse_message(str(error))
    size, counting = len(await raw_request.body()), http_server.anthropic_v1_count_tokens(request, raw_request)
    return await in_thread(size, finished, counting)


async def _operation_failed(_request: Request, error: Exception) -> Response:
    return ORJSONResponse({"error": {"message": str(error)}}, status_code=HTTPStatus.BAD_REQUEST)


@HOOKS.on("sglang.srt.entrypoints.http_server").required(
    "set_global_state",
    "AFTER",
    "http",
    "routes take prompts with chunks, workers share what they know of them, a shadow compares answers",
)
def start(_result: Any, global_state: Any) -> None:
    """Prepare this process to serve prompts with chunks."""
    manager = global_state.tokenizer_manager
    install_routes()
    frontend.share(manager)
    this = frontend.frontend_of(manager)
    if rate := this.config.shadow_rate:
        labels = manager.metrics_collector.labels
        this.shadow = measured_shadow(this.prompts, rate, this.config.shadow_min_agreement, labels)


def install_routes() -> None:
    """Replace SGLang's endpoints by ours, and add our own."""
    extend_protocol()
    app = http_server.app
    replace_route(app, "/generate", generate)
    replace_route(app, "/v1/completions", completions)
    for path in ("/v1/chat/completions", "/invocations"):
        replace_route(app, path, chat)
    replace_route(app, "/v1/responses", responses)
    replace_route(app, "/v1/responses/{response_id}", retrieve)
    replace_route(app, "/v1/responses/{response_id}/cancel", cancel)
    replace_route(app, "/v1/messages", messages)
    replace_route(app, "/v1/messages/count_tokens", count_tokens)
    for route in list(app.router.routes):
        if (refusing := REFUSING.get(getattr(route, "endpoint", None))) is not None:
            replace_route(app, route.path, refusing)  # SGLang reads some of these paths from its environment
    app.add_exception_handler(OperationError, _operation_failed)
    chunk_routes.add_routes(app, frontend.current)
    page.add_route(app)
    scopes.close(app)
    app.add_exception_handler(RequestValidationError, refuse_invalid)
    app.openapi_schema = None
    # One of several tokenizer workers gets here while it starts, when the middleware has been built around the former
    # handlers of errors. It is built again for the next request.
    app.middleware_stack = None

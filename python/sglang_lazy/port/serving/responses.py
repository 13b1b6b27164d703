"""Chunks in SGLang's Responses API: the request model, its conversion to a prompt, and who may see stored responses."""

import functools
from collections.abc import Callable
from typing import Any

from fastapi import Request
from fastapi.responses import ORJSONResponse
from pydantic import PrivateAttr
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ResponsesRequest as StockRequest
from sglang.srt.entrypoints.openai.serving_responses import _MediaInputValidationError

from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.serving.chat import MessagesWithChunks, with_placeholders
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.serving import response_ids
from sglang_lazy.serving.chat import ChunkParts, History
from sglang_lazy.serving.chat_requests import check_chunks, put_chunks, refuse_media
from sglang_lazy.serving.malformed import reading
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.prompts import Prompts
from sglang_lazy.serving.salts import check_cache_salt, salt_of
from sglang_lazy.serving.threads import finished, in_thread

HOOKS = Hooks()
_RESPONSES = HOOKS.on("sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses")


class ResponsesRequest(MessagesWithChunks, StockRequest):
    """SGLang's request to `/v1/responses` with chunk parts and their link."""

    metadata: dict[str, str] | None = None  # as in stream events, which would fail with other values

    _planned: tuple[Prompts, Plan | None] | None = PrivateAttr(default=None)
    _size: int = PrivateAttr(default=0)  # of the body

    @classmethod
    def take_chunks(cls, data: dict[str, Any], chunk_parts: ChunkParts) -> dict[str, Any]:
        """Take chunks out of messages, function outputs, and text divided by a separator."""
        given = data.get("input")
        if isinstance(given, str):
            return {**data, "input": chunk_parts.take_from_content(given, "input", "user")}
        return {**data, "input": chunk_parts.take_from(given, "input")}

    def to_sampling_params(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """SGLang's parameters, with the plan."""
        params = super().to_sampling_params(*args, **kwargs)
        if self._planned is None:
            return params
        prompts, plan = self._planned
        return prompts.with_plan(params, plan)


@_RESPONSES.feature("_response_input_history", "AFTER", "chunks of earlier turns")
def keep_chunks(history: list, _serving: Any, request: Any) -> list:
    """After `OpenAIServingResponses._response_input_history`, which SGLang stores, followed by the answer."""
    chunk_parts = request._chunk_parts if isinstance(request, ResponsesRequest) else None
    return History(history, chunk_parts) if chunk_parts is not None and chunk_parts.parts else history


@_RESPONSES.feature("_make_request", "AROUND", "responses with chunks")
async def make_request(
    make: Callable, serving: Any, request: Any, earlier: Any, tokenizer: Any, **kwargs: Any
) -> tuple:
    """Render with placeholders, then insert the chunks.

    earlier: the response that the request follows, or None.
    """
    try:
        with reading():
            if not isinstance(request, ResponsesRequest):
                return await make(serving, request, earlier, tokenizer, **kwargs)
            bound = functools.partial(make, **kwargs)
            return await in_thread(request._size, finished, _make_request(bound, serving, request, earlier, tokenizer))
    except ValueError as error:  # SGLang tells this one as it is, and adds "None" to others
        raise _MediaInputValidationError(str(error)) from None


async def _make_request(make: Callable, serving: Any, request: ResponsesRequest, earlier: Any, tokenizer: Any) -> tuple:
    stored = None if earlier is None else serving.msg_store.get(earlier.id)
    if isinstance(stored, History):
        request._chunk_parts = request._chunk_parts.continuing(stored.chunk_parts)
    chunk_parts = request._chunk_parts
    if not chunk_parts.parts:
        request.refuse_without_chunks()
        return await make(serving, request, earlier, tokenizer)
    prompts = frontend_of(serving.tokenizer_manager).prompts
    check_chunks(prompts, chunk_parts)
    check_cache_salt(request.cache_salt)
    view = with_placeholders(serving, chunk_parts)
    messages, _, _, processed = await make(view, request, earlier, view.tokenizer_manager.tokenizer)
    refuse_media(processed, "image", "video", "audio")  # SGLang would drop them in this API
    input_ids, plan = put_chunks(prompts, request.link, request.cache_salt, processed.prompt_ids, chunk_parts)
    request._planned, request.cache_salt = (prompts, plan), None  # the layout carries the cache salt
    return messages, [input_ids], [input_ids], processed


def take_ids(serving: Any, request: Any) -> ORJSONResponse | None:
    """Give a request its id. Returns the answer for an unknown response if it follows another tenant's.

    Raises ValueError if the client has chosen an id of a stored response.
    """
    if "request_id" not in request.model_fields_set:
        request.request_id = response_ids.new_id(request.cache_salt)
    elif request.request_id.startswith(response_ids.PREFIX):
        raise ValueError(f"request_id: ids that begin with {response_ids.PREFIX} are the server's")
    return _not_found(serving, request.previous_response_id, request.cache_salt)


def _not_found(serving: Any, response_id: str | None, salt: str | None) -> ORJSONResponse | None:
    if response_id is None or not response_id.startswith(response_ids.PREFIX) or response_ids.is_of(salt, response_id):
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

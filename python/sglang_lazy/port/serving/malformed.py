"""Refuse with a 400 malformed requests that SGLang would answer with a 500, or that would crash its scheduler; and on
routes that take no chunks, fields of ours, which they would ignore.

SGLang checks ranges but not types, and values of other types end its scheduler or detokenizer. Types are read from
SGLang's own classes, so a field that a later release adds is converted as well.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ErrorResponse
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_lazy.port.hooks import Hooks
from sglang_lazy.serving import fields, malformed
from sglang_lazy.serving.conversion import Fields, Parameters, field_names, types_of
from sglang_lazy.serving.malformed import reading
from sglang_lazy.serving.validation import the_one

_PROMPT = {"text", "input_ids", "input_embeds", "image_data", "video_data", "audio_data"}
"""Fields that are not converted: they may be long, and are read before a request leaves this process."""
_OWN_CHECKS = _PROMPT | {"sampling_params", "session_params"}
"""Fields that are checked elsewhere."""
DEFAULTS = {
    field.name: field.default
    for kind in (EmbeddingReqInput, GenerateReqInput)
    for field in dataclasses.fields(kind)
    if field.name in fields.SERVER_FIELDS
}
"""Of the fields that only the server sets."""
_SESSION = Parameters(types_of(SessionParams))
_SAMPLING = Parameters(
    {
        **{name: kind for name, kind in types_of(SamplingParams).items() if name not in fields.INTERNAL_PARAMS},
        "stop_token_ids": list[int | None] | None,  # SGLang skips nulls
        "custom_params": dict | None,  # may hold anything, since SGLang's processes exchange pickles by default
    },
    wide=("sampling_seed",),
    free=("custom_params",),
)
convert_sampling_params = functools.partial(_SAMPLING.convert_each, "sampling_params")
_REFUSED = "SGLang refuses them with a 400 (such as sglang#28960, sglang#40076)"
HOOKS = Hooks()
_INPUT = "sglang.srt.managers.io_struct.GenerateReqInput"


def convert_request(obj: Any) -> None:
    """Convert the fields of a `GenerateReqInput` or `EmbeddingReqInput` in place.

    Raises ValueError, naming the field, for a value of another type, a number of more than 64 bits, and a name that is
    not printable.
    """
    kind: type = type(obj)
    _convertible(kind).convert(obj)
    fields.check_names(vars(obj))
    if getattr(obj, "session_params", None) is not None:
        obj.session_params = _SESSION.convert("session_params", obj.session_params)
    obj.sampling_params = convert_sampling_params(obj.sampling_params)


@functools.cache
def _convertible(kind: Any) -> Fields:
    return Fields(kind, _OWN_CHECKS)


async def check_body(request: Request, kind: type) -> None:
    """Raise ValueError for a field that is the server's, or one of ours that the route would ignore.

    kind: the class of the route's bodies.
    """
    body = await request.json()  # read already, and kept
    if isinstance(body, Mapping):
        server_args = http_server.get_global_state().tokenizer_manager.server_args
        fields.check_body(body, field_names(kind), DEFAULTS, server_args.disaggregation_mode != "null")


async def _check_body(parameters: dict[str, Any]) -> None:
    request = next(value for value in parameters.values() if isinstance(value, Request))
    (body,) = (value for value in parameters.values() if value is not request)
    await check_body(request, type(body))


@HOOKS.on(_INPUT, "sglang.srt.managers.io_struct.EmbeddingReqInput").repair(
    "normalize_batch_and_arguments", "AROUND", "malformed batches are refused", _REFUSED
)
def check_lists(normalize: Callable, obj: Any) -> None:
    """Convert values, check that lists have one for each prompt."""
    if isinstance(obj.input_ids, Mapping):  # in `/api/chat`: Transformers 5 renders a chat template to a mapping
        obj.input_ids = obj.input_ids["input_ids"]
    with reading():
        convert_request(obj)
        normalize(obj)
    malformed.check_lists(vars(obj), None if obj.is_single else obj.batch_size)


@HOOKS.on(_INPUT).repair("_handle_parallel_sampling", "AFTER", "malformed batches of samples are refused", _REFUSED)
def check_samples(_result: Any, obj: Any) -> None:
    """Limit the samples, which SGLang does not."""
    malformed.check_samples(obj.parallel_sample_num, obj.batch_size)


def check_one(obj: Any, vocab_size: int) -> None:
    """Raise ValueError for a single request that would crash the scheduler."""
    malformed.check_one(vars(obj), obj.contains_mm_input(), vocab_size)
    if not isinstance(obj.positional_embed_overrides, PositionalEmbeds | None):
        raise ValueError("positional_embed_overrides must be PositionalEmbeds, which only Python can make")


@HOOKS.on("sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize").repair(
    "_convert_to_internal_request", "BEFORE", "malformed tokens to decode are refused", _REFUSED
)
def check_detokenized(serving: Any, request: Any, raw_request: Any = None) -> None:
    """Refuse numbers that do not fit in 32 bits."""
    malformed.check_detokenized(request.tokens)


@HOOKS.on("sglang.srt.managers.load_snapshot.LoadSnapshot").repair(
    "to_dict", "AROUND", "unknown sections of /v1/loads are refused", _REFUSED
)
def check_sections(to_dict: Callable, snapshot: Any, include: Any = None) -> dict[str, Any]:
    """Answer with a 400 when it refuses, which `/v1/loads` does not handle."""
    try:
        return to_dict(snapshot, include)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None


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


def _as_of_generate(reason: str) -> Response:
    return ORJSONResponse({"error": {"message": reason}}, HTTPStatus.BAD_REQUEST)


def _as_of_openai(reason: str) -> Response:
    error = ErrorResponse(message=reason, type="BadRequestError", code=HTTPStatus.BAD_REQUEST)
    return ORJSONResponse(error.model_dump(), HTTPStatus.BAD_REQUEST)


def _as_of_tools(reason: str) -> Response:
    raise HTTPException(HTTPStatus.BAD_REQUEST, reason)


_REFUSALS = {
    _as_of_generate: (
        http_server.classify_request,
        http_server.encode_request,
        http_server.ollama_chat,
        http_server.ollama_generate,
        http_server.vertex_generate,
    ),
    _as_of_openai: (
        http_server.openai_v1_classify,
        http_server.openai_v1_embeddings,
        http_server.openai_v1_tokenize,
        http_server.v1_rerank_request,
        http_server.v1_score_request,
    ),
    _as_of_tools: (
        http_server.parse_function_call_request,
        http_server.separate_reasoning_request,
    ),
}
"""By how SGLang words its own refusals there, its endpoints that take no chunks."""
REFUSING = {
    endpoint: malformed.refusing(endpoint, _check_body, refuse)
    for refuse, endpoints in _REFUSALS.items()
    for endpoint in endpoints
}
"""By SGLang's endpoint, its replacement."""

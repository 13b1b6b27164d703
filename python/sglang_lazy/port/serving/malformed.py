"""Refuse with a 400 malformed requests that SGLang would answer with a 500, or that would crash its scheduler; and on
routes that take no chunks, fields of ours, which they would ignore."""

import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import ORJSONResponse, StreamingResponse
from pydantic import ValidationError
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.embed_types import PositionalEmbeds

from sglang_lazy.port.hooks import repair
from sglang_lazy.port.serving.fields import check_body, convert_request
from sglang_lazy.serving.validation import the_one, told

_READ_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, re.error)
_ONE_FOR_EACH_PROMPT = (
    "rid",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_sampling_mask",
    "return_hidden_states",
    "lora_path",
    "custom_logit_processor",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
)
"""Fields that may be lists only in batches of prompts."""
MAX_SAMPLES = 16_384
"""Limit on the samples of all prompts of a request, if n > 1."""
MIN_PENALTY, MAX_BIAS = 1e-6, 1e6
_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """A context that turns Python's errors while a request is read into ValueError, which APIs answer with a 400.

    Before a request is sent to a scheduler, errors should be the request's fault; if not, the traceback is in the log.
    """
    try:
        yield
    except ValidationError as error:
        raise ValueError(told(error)) from None
    except _READ_ERRORS as error:
        _logger.exception("A request cannot be read")
        raise ValueError(f"the request is malformed: {type(error).__name__}: {error}") from error


def read(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Around functions that read requests."""
    with reading():
        return function(*args, **kwargs)


def check_lists(normalize: Callable, obj: Any) -> None:
    """Around `normalize_batch_and_arguments` of requests: convert values, check that lists have one for each prompt."""
    if isinstance(obj.input_ids, Mapping):  # in `/api/chat`: Transformers 5 renders a chat template to a mapping
        obj.input_ids = obj.input_ids["input_ids"]
    with reading():
        convert_request(obj)
        normalize(obj)
    for name in _ONE_FOR_EACH_PROMPT:
        value = getattr(obj, name, None)
        if not isinstance(value, list):
            continue
        if obj.is_single:
            raise ValueError(f"{name} is a list, which is for batches of prompts")
        if len(value) < obj.batch_size:
            raise ValueError(f"{name} has {len(value)} values for a batch of {obj.batch_size} prompts")


def check_samples(_result: Any, obj: Any) -> None:
    """After `GenerateReqInput._handle_parallel_sampling`: limit the samples, which SGLang does not."""
    num_samples = obj.batch_size * obj.parallel_sample_num
    if obj.parallel_sample_num < 1:
        raise ValueError(f"n must be at least 1, got {obj.parallel_sample_num}")
    if obj.parallel_sample_num > 1 and num_samples > MAX_SAMPLES:
        raise ValueError(f"a request may have at most {MAX_SAMPLES} samples (n) of all its prompts, got {num_samples}")


def check_one(obj: Any, vocab_size: int) -> None:
    """Raise ValueError for a single request that would crash the scheduler."""
    ids = None if obj.contains_mm_input() else obj.input_ids
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        raise ValueError(f"input_ids has a token that is not in the vocabulary, which has {vocab_size}")
    if not 0 <= (getattr(obj, "top_logprobs_num", None) or 0) <= vocab_size:
        raise ValueError(f"top_logprobs_num must be from 0 to {vocab_size}, got {obj.top_logprobs_num}")
    if (getattr(obj, "logprob_start_len", None) or 0) < -1:
        raise ValueError(f"logprob_start_len must be a position, or -1 for none, got {obj.logprob_start_len}")
    _check_sampling(obj.sampling_params or {}, vocab_size)
    if not isinstance(obj.positional_embed_overrides, PositionalEmbeds | None):
        raise ValueError("positional_embed_overrides must be PositionalEmbeds, which only Python can make")


def _check_sampling(params: dict[str, Any], vocab_size: int) -> None:
    """Raise ValueError for numbers that overflow SGLang's tensors, index beyond them, or make logits infinite."""
    top_k, penalty = params.get("top_k"), params.get("repetition_penalty")
    biases = params.get("logit_bias") or {}
    if top_k is not None and top_k >= 2**31:
        raise ValueError(f"top_k must be an integer of 32 bits, got {top_k}")
    if penalty is not None and 0 < penalty < MIN_PENALTY:
        raise ValueError(f"repetition_penalty must be at least {MIN_PENALTY}, got {penalty}")
    if not all(abs(bias) <= MAX_BIAS for bias in biases.values()):
        raise ValueError(f"logit_bias must have values from -{MAX_BIAS} to {MAX_BIAS}")
    stops = [token for token in params.get("stop_token_ids") or () if token is not None]
    if params.get("min_new_tokens") and not all(0 <= token < vocab_size for token in stops):
        raise ValueError(f"with min_new_tokens, stop_token_ids must be in the vocabulary, which has {vocab_size}")


def check_detokenized(serving: Any, request: Any, raw_request: Any = None) -> None:
    """Before `OpenAIServingDetokenize._convert_to_internal_request`: refuse numbers that do not fit in 32 bits."""
    for item in request.tokens:
        for token in item if isinstance(item, list) else [item]:
            if not 0 <= token < 2**32:
                raise ValueError(f"{token} is not a token id")


def check_sections(to_dict: Callable, snapshot: Any, include: Any = None) -> dict[str, Any]:
    """Around `LoadSnapshot.to_dict`: answer with a 400 when it refuses, which `/v1/loads` does not handle."""
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


_INPUTS = "sglang.srt.managers.io_struct"
HOOKS = (
    repair(
        f"{_INPUTS}.GenerateReqInput.normalize_batch_and_arguments",
        check_lists,
        "AROUND",
        "malformed batches are refused",
        "SGLang refuses them with a 400",
    ),
    repair(
        f"{_INPUTS}.GenerateReqInput._handle_parallel_sampling",
        check_samples,
        "AFTER",
        "malformed batches of samples are refused",
        "SGLang refuses them with a 400",
    ),
    repair(
        f"{_INPUTS}.EmbeddingReqInput.normalize_batch_and_arguments",
        check_lists,
        "AROUND",
        "malformed batches are refused",
        "SGLang refuses them with a 400",
    ),
    repair(
        "sglang.srt.managers.load_snapshot.LoadSnapshot.to_dict",
        check_sections,
        "AROUND",
        "unknown sections of /v1/loads are refused",
        "SGLang refuses them with a 400",
    ),
    repair(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._init_req_state",
        read,
        "AROUND",
        "malformed parameters are refused before their request has a state",
        "SGLang refuses them with a 400",
    ),
    repair(
        "sglang.srt.entrypoints.openai.serving_tokenize.OpenAIServingDetokenize._convert_to_internal_request",
        check_detokenized,
        "BEFORE",
        "malformed tokens to decode are refused",
        "SGLang refuses them with a 400",
    ),
)

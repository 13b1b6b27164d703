"""Checks of what requests give, before anything is computed for them: what cannot be read, or would end the scheduler,
is a ValueError, which APIs answer with a 400."""

import contextlib
import functools
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from sglang_lazy.serving.validation import told

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
    """A context that turns Python's errors while a request is read into ValueError.

    Before a request is sent to a scheduler, errors should be the request's fault; if not, the traceback is in the log.
    """
    try:
        yield
    except ValidationError as error:
        raise ValueError(told(error)) from None
    except _READ_ERRORS as error:
        _logger.exception("A request cannot be read")
        raise ValueError(f"the request is malformed: {type(error).__name__}: {error}") from error


def check_lists(given: Mapping[str, Any], num_prompts: int | None) -> None:
    """Raise ValueError for lists that are too short for a batch, or where there is none.

    given: a request's fields.  num_prompts: of the batch; None for a single prompt.
    """
    for name in _ONE_FOR_EACH_PROMPT:
        value = given.get(name)
        if not isinstance(value, list):
            continue
        if num_prompts is None:
            raise ValueError(f"{name} is a list, which is for batches of prompts")
        if len(value) < num_prompts:
            raise ValueError(f"{name} has {len(value)} values for a batch of {num_prompts} prompts")


def check_samples(n: int, num_prompts: int) -> None:
    """Raise ValueError for too many samples.  n: of each prompt."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if n > 1 and n * num_prompts > MAX_SAMPLES:
        raise ValueError(
            f"a request may have at most {MAX_SAMPLES} samples (n) of all its prompts, got {n * num_prompts}"
        )


def check_ids(ids: Sequence[int] | None, vocab_size: int) -> None:
    """Raise ValueError for tokens outside the vocabulary."""
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        raise ValueError(f"input_ids has a token that is not in the vocabulary, which has {vocab_size}")


def check_logprobs(top: int | None, start: int | None, vocab_size: int) -> None:
    """Raise ValueError for log-probabilities that there are not.  start: the first position, -1 for none."""
    if not 0 <= (top or 0) <= vocab_size:
        raise ValueError(f"top_logprobs_num must be from 0 to {vocab_size}, got {top}")
    if (start or 0) < -1:
        raise ValueError(f"logprob_start_len must be a position, or -1 for none, got {start}")


def check_sampling(params: Mapping[str, Any], vocab_size: int) -> None:
    """Raise ValueError for numbers that overflow the sampler's tensors, index beyond them, or make logits infinite."""
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


def check_one(given: Mapping[str, Any], has_media: bool, vocab_size: int) -> None:
    """Raise ValueError for a prompt that would crash the scheduler.  given: its request's fields.

    has_media: whether tokens outside the vocabulary may stand for images or the like.
    """
    check_ids(None if has_media else given["input_ids"], vocab_size)
    check_logprobs(given.get("top_logprobs_num"), given.get("logprob_start_len"), vocab_size)
    check_sampling(given["sampling_params"] or {}, vocab_size)


def check_detokenized(tokens: Sequence[Any]) -> None:
    """Raise ValueError for numbers to decode, or lists of them, that do not fit in 32 bits."""
    for item in tokens:
        for token in item if isinstance(item, list) else [item]:
            if not 0 <= token < 2**32:
                raise ValueError(f"{token} is not a token id")


def refusing(
    endpoint: Callable, check: Callable[[dict[str, Any]], Awaitable[None]], refuse: Callable[[str], Any]
) -> Callable:
    """`endpoint`, answering requests that it cannot read with a 400. A stream begins only with its first event.

    check: raises ValueError for parameters of the endpoint, by name.  refuse: the answer that gives a reason.
    """

    @functools.wraps(endpoint)
    async def read(**parameters: Any) -> Any:
        try:
            with reading():
                await check(parameters)
                response = await endpoint(**parameters)
                if isinstance(response, StreamingResponse):
                    events: Any = response.body_iterator
                    response.body_iterator = _resume(await anext(events, b""), events)
        except ValueError as error:
            return refuse(str(error))
        return response

    return read


async def _resume(first: bytes, events: AsyncIterator) -> AsyncIterator:
    yield first
    async for event in events:
        yield event

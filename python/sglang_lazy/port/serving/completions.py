"""Segments in SGLang's OpenAI completions API: the request model, and its conversion to an internal request."""

from collections.abc import Callable
from typing import Any

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator
from sglang.srt.entrypoints.openai.protocol import CompletionRequest

from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.serving import frontend
from sglang_lazy.serving.malformed import reading
from sglang_lazy.serving.text import check_separator

HOOKS = Hooks()


class CompletionsRequest(CompletionRequest):
    """SGLang's completion request with a prompt, or a batch of prompts, of segments."""

    segments: Any = None
    cache_salt: list[str | None] | str | None = None
    link: Any = None
    chunk_separator: str | None = None

    _given: frozenset[str] = PrivateAttr(default=frozenset())

    @model_validator(mode="wrap")
    @classmethod
    def _take_segments(cls, data: Any, handler: ModelWrapValidatorHandler) -> "CompletionsRequest":
        data, given = frontend.current().prompts.take_segments(data) if isinstance(data, dict) else (data, frozenset())
        # SGLang validates a prompt, too.
        request = handler({**data, "prompt": "segments"} if "segments" in given and "prompt" not in given else data)
        request._given = given
        return request


@HOOKS.on("sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion").feature(
    "_convert_to_internal_request", "AROUND", "completions with chunks"
)
@reading()
def convert_request(convert: Callable, serving: Any, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
    """Turn segments into the prompt."""
    if not isinstance(request, CompletionsRequest):
        return convert(serving, request, raw_request)
    if request.echo and request.logprobs == 0:
        raise ValueError("echo and logprobs 0 cannot be combined, which SGLang fails at: logprobs must be at least 1")
    prompts = frontend.frontend_of(serving.tokenizer_manager).prompts
    if request.segments is None:
        if request.link is not None and not prompts.separator(request.chunk_separator):
            raise ValueError("link needs a prompt given as segments")
        check_separator(request.chunk_separator, request.prompt)
        return convert(serving, request, raw_request)
    _check(serving, request)
    # As in all APIs, the layout carries the cache salt, which may be a list here.
    adapted, _ = convert(serving, request.model_copy(update={"cache_salt": None}), raw_request)
    args = prompts.to_generate_args(request.segments, request.cache_salt, adapted.sampling_params, request.link)
    adapted.text, adapted.input_ids, adapted.sampling_params = None, args["input_ids"], args["sampling_params"]
    request.prompt = adapted.input_ids  # SGLang's `echo` repeats it
    return adapted, request


def _check(serving: Any, request: CompletionsRequest) -> None:
    for field in ("prompt", "suffix"):
        if field in request._given:
            raise ValueError(f"segments cannot be combined with {field}: leave it out, or empty")
    if serving.template_manager.completion_template_name is not None:
        raise ValueError("segments cannot be combined with a completion template (--completion-template)")

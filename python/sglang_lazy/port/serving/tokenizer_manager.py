"""Hooks on SGLang's tokenizer manager: tenants and checks before a request is sent, and reports on its results."""

from collections.abc import AsyncGenerator, Callable
from typing import Any

from sglang_lazy.core.segments import LAYOUT_PARAM
from sglang_lazy.port.facts import UPDATES
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.port.serving.frontend import frontend_of
from sglang_lazy.port.serving.malformed import check_one
from sglang_lazy.port.serving.requests import choose_rank, keeping_tokens, own_plan, plan_of, served
from sglang_lazy.serving.labels import labels_in
from sglang_lazy.serving.malformed import reading
from sglang_lazy.serving.plans import check_combined
from sglang_lazy.serving.results import SharedReport, annotated, learned
from sglang_lazy.serving.salts import salt_of
from sglang_lazy.serving.shadow import shadowed
from sglang_lazy.serving.streams import announce, with_logprobs
from sglang_lazy.serving.threads import LARGE, begin_turn, finished, give_way, in_thread, num_characters

KEY_END = "/"
"""Ends a client's key, to which SGLang appends the id of the adapter. Ids of adapters that --lora-paths names can be
computed from their names and paths, and without an end a key of that id would be the adapter's own namespace."""
HEALTH_ROUTES = ("/health", "/health_generate")
HOOKS = Hooks()
_TOKENIZER_MANAGER = HOOKS.on("sglang.srt.managers.tokenizer_manager.TokenizerManager")
_NEED_IDLE = ("flush_cache", "release_memory_occupation", *UPDATES)


@_TOKENIZER_MANAGER.required("_init_req_state", "AROUND", "tokenizer", "tenants are kept apart on every route")
def begin(original: Callable, manager: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Around `TokenizerManager._init_req_state`, with which each request of every route begins, and which reads its
    parameters: apply the header's salt, on routes of SGLang's that know none as well.

    Not to a health check, whose prompt is SGLang's own: a bad header would have the server reported as unhealthy.
    """
    begin_turn()
    if request is not None and hasattr(obj, "cache_salt") and not request.url.path.endswith(HEALTH_ROUTES):
        salt = salt_of(obj.cache_salt, request.headers)
        is_one = obj.is_single or salt is None or isinstance(salt, list)
        obj.cache_salt = salt if is_one else [salt] * len(obj.sampling_params)
    with reading():
        return original(manager, obj, request, *args, **kwargs)


@_TOKENIZER_MANAGER.required("_tokenize_one_request", "AROUND", "tokenizer", "chunks keep their tokens")
async def tokenize_request(tokenize: Callable, manager: Any, obj: Any) -> Any:
    """Around `TokenizerManager._tokenize_one_request`, which checks every request: announce refusals to streams, and
    keep the tokens of prompts with chunks and images."""
    await give_way()
    try:
        with reading():
            return await tokenize(keeping_tokens(manager, obj), obj)
    except ValueError as error:
        announce(error)
        raise


@_TOKENIZER_MANAGER.feature("_tokenize_texts", "AROUND", "long prompts are tokenized in threads")
async def tokenize_texts(tokenize: Callable, manager: Any, texts: Any, *args: Any, **kwargs: Any) -> Any:
    """Tokenize long texts in a thread, unless SGLang does."""
    if manager.async_dynamic_batch_tokenizer is not None or (size := num_characters(texts)) < LARGE:
        return await tokenize(manager, texts, *args, **kwargs)
    return await in_thread(size, finished, tokenize(manager, texts, *args, **kwargs))


@_TOKENIZER_MANAGER.required(
    "_validate_one_request", "BEFORE", "tokenizer", "prompts with chunks are checked, and a shadow gives way"
)
def prepare_request(manager: Any, obj: Any, input_ids: list[int] | None) -> None:
    """Before `TokenizerManager._validate_one_request`, which checks every request: have a shadow give way to it, refuse
    requests that would crash the scheduler, such as empty prompts, and check prompts with a layout.

    Raises ValueError, answered with a 400, for these and for options that cannot be combined with chunks. Gives the
    layout's cache salt to SGLang, which separates whole prompts by it, and chooses the prompt's data-parallel rank.
    """
    if (shadow := frontend_of(manager).shadow) is not None:
        shadow.give_way(obj.rid)
    is_whole = obj.input_embeds is None and not getattr(obj, "session_params", None)  # without a session's history
    if input_ids is not None and not len(input_ids) and is_whole:
        raise ValueError("the prompt is empty")
    length = manager.num_reserved_tokens + (0 if input_ids is None else len(input_ids))
    if length >= manager.context_len and not manager.allow_auto_truncate:
        return  # refused next, whatever else may be wrong
    check_one(obj, manager.model_config.vocab_size)
    plan = plan_of(obj)
    if plan is not None:
        obj.cache_salt = plan.layout.cache_salt or obj.cache_salt
        if (obj.sampling_params.get("n") or 1) > 1:
            own_plan(obj).report = SharedReport()
    if plan is None or input_ids is None or not plan.policy.reuses:
        return
    check_combined(vars(obj), plan.layout, frontend_of(manager).prompts.max_chunks)
    if length >= manager.context_len:
        raise ValueError(
            f"The input ({length} tokens) is longer than the model's context length ({manager.context_len} tokens), "
            "and a prompt with chunks is not truncated."
        )
    choose_rank(manager, obj, plan, input_ids)


@_TOKENIZER_MANAGER.required(
    "_create_tokenized_object", "AFTER", "tokenizer", "schedulers get the tenant of each request"
)
def to_scheduler(tokenized: Any, *_args: Any) -> Any:
    """End the client's key, and send the layout, which is of a class of ours that msgpack does not know, as a plain
    string. The scheduler trusts this process."""
    if getattr(tokenized, "extra_key", None):
        tokenized.extra_key += KEY_END
    params = tokenized.sampling_params
    if params.custom_params and LAYOUT_PARAM in params.custom_params:
        params.custom_params = {**params.custom_params, LAYOUT_PARAM: str(params.custom_params[LAYOUT_PARAM])}
    return tokenized


@_TOKENIZER_MANAGER.required("_wait_one_response", "AROUND", "tokenizer", "answers report reused chunks")
def report_chunks(wait: Callable, manager: Any, obj: Any, request: Any = None) -> AsyncGenerator[dict, None]:
    """Add the link and the chunk report to a request's last output.

    SGLang calls it once the request has been sent to the scheduler. If the scheduler refuses it, ValueError is raised
    even in a stream, so that APIs can answer with an error.
    """
    if getattr(obj, "is_single", False):
        announce(None)
    outputs = wait(manager, obj, request)
    if getattr(obj, "stream", False) and getattr(obj, "return_logprob", False):
        outputs = with_logprobs(outputs)
    plan = plan_of(obj)
    if plan is None:
        return outputs
    frontend, request = frontend_of(manager), served(obj, plan)
    if plan.labels:
        frontend.labels.add(plan.layout.cache_salt, labels_in(plan, obj.input_ids))
    outputs = learned(annotated(outputs, request, frontend.usage, frontend.misses), obj.sampling_params)
    if frontend.shadow is None or not plan.policy.reuses:
        return outputs
    state = manager.rid_to_state.get(obj.rid)
    return shadowed(outputs, frontend.shadow, request, lambda: state.output_ids)


@_TOKENIZER_MANAGER.feature("abort_request", "BEFORE", "a shadow ends when everything is aborted")
def abort_with_all(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """If all requests are aborted, do not start the shadow again."""
    shadow = frontend_of(manager).shadow
    if shadow is not None and abort_all:
        shadow.cancel()


@_TOKENIZER_MANAGER.feature(_NEED_IDLE, "AROUND", "a shadow ends before what needs an idle server")
async def make_idle(original: Callable, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around calls that SGLang refuses or delays while the server is busy: stop the shadow first."""
    shadow = frontend_of(manager).shadow
    if shadow is not None and shadow.under_way:
        await shadow.stop()
        await manager.get_internal_state()  # answered when the scheduler's last batch is over
    return await original(manager, *args, **kwargs)

"""Keep tenants' requests apart: on every route the salt and the client's own key become one `extra_key`."""

from collections.abc import Callable
from typing import Any

from sglang_lazy.core.segments import LAYOUT_PARAM
from sglang_lazy.port.hooks import Hook
from sglang_lazy.serving.requests import keep_apart, salt_in


def compute_extra_key(_compute: Callable, _serving: Any, request: Any) -> Any:
    """Around `OpenAIServingBase._compute_extra_key`, which concatenates both: salt "a" with key "b" would be "ab"."""
    salt, key = getattr(request, "cache_salt", None), getattr(request, "extra_key", None)
    if isinstance(key, list):
        raise ValueError("extra_key must be a string, got a list")
    kept_apart = keep_apart(salt, key)  # checks both
    return key if salt is None else kept_apart  # a layout may add the salt later


def take_salt(_manager: Any, obj: Any, request: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Before `TokenizerManager._init_req_state`, to which every route's requests come: apply the header's salt, on
    routes of SGLang's that know none as well."""
    salt = None if request is None else salt_in(request.headers)
    if salt is None or not hasattr(obj, "extra_key"):
        return
    if not obj.is_single and obj.extra_key is None:
        obj.extra_key = [None] * len(obj.sampling_params)
    obj.extra_key = keep_apart(salt, obj.extra_key)


def send_plain(tokenized: Any, *_args: Any) -> Any:
    """After `TokenizerManager._create_tokenized_object`: the scheduler, which trusts this process, gets plain strings
    in place of those of our own classes, which msgpack does not know."""
    if getattr(tokenized, "extra_key", None) is not None:
        tokenized.extra_key = str(tokenized.extra_key)
    params = tokenized.sampling_params
    if params.custom_params and LAYOUT_PARAM in params.custom_params:
        params.custom_params = {**params.custom_params, LAYOUT_PARAM: str(params.custom_params[LAYOUT_PARAM])}
    return tokenized


_OPENAI = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase"
_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    Hook(f"{_OPENAI}._compute_extra_key", compute_extra_key, "AROUND"),
    Hook(f"{_TOKENIZER_MANAGER}._init_req_state", take_salt, "BEFORE"),
    Hook(f"{_TOKENIZER_MANAGER}._create_tokenized_object", send_plain, "AFTER"),
)

"""Keep tenants' requests apart on every route, whatever salt, key and adapter they name."""

from typing import Any

from sglang_lazy.core.segments import LAYOUT_PARAM
from sglang_lazy.port.hooks import required
from sglang_lazy.serving.salts import salt_of

KEY_END = "/"
"""Ends a client's key, to which SGLang appends the id of the adapter. Ids of adapters that --lora-paths names can be
computed from their names and paths, and without an end a key of that id would be the adapter's own namespace."""


HEALTH_ROUTES = ("/health", "/health_generate")


def take_salt(_manager: Any, obj: Any, request: Any = None, *_args: Any, **_kwargs: Any) -> None:
    """Before `TokenizerManager._init_req_state`, to which every route's requests come: apply the header's salt, on
    routes of SGLang's that know none as well.

    Not to a health check, whose prompt is SGLang's own: a bad header would have the server reported as unhealthy.
    """
    if request is None or not hasattr(obj, "cache_salt") or request.url.path.endswith(HEALTH_ROUTES):
        return
    salt = salt_of(obj.cache_salt, request.headers)
    is_one = obj.is_single or salt is None or isinstance(salt, list)
    obj.cache_salt = salt if is_one else [salt] * len(obj.sampling_params)


def to_scheduler(tokenized: Any, *_args: Any) -> Any:
    """After `TokenizerManager._create_tokenized_object`: end the client's key, and send the layout, which is of a class
    of ours that msgpack does not know, as a plain string. The scheduler trusts this process."""
    if getattr(tokenized, "extra_key", None):
        tokenized.extra_key += KEY_END
    params = tokenized.sampling_params
    if params.custom_params and LAYOUT_PARAM in params.custom_params:
        params.custom_params = {**params.custom_params, LAYOUT_PARAM: str(params.custom_params[LAYOUT_PARAM])}
    return tokenized


_TOKENIZER_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
HOOKS = (
    required(
        f"{_TOKENIZER_MANAGER}._init_req_state",
        take_salt,
        "BEFORE",
        "tokenizer",
        "tenants are kept apart on every route",
    ),
    required(
        f"{_TOKENIZER_MANAGER}._create_tokenized_object",
        to_scheduler,
        "AFTER",
        "tokenizer",
        "schedulers get the tenant of each request",
    ),
)

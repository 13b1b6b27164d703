"""Faults of SGLang's HTTP process: what it aborts, shows, keeps and counts.

- Two seconds after a stream has ended, SGLang aborts the request by its id, in case the client has left, also if it was
  refused or answered. Then the id may be another request's, which would be aborted; or the request has not been read so
  far that it has one, and an error closes the connection.
- A key (`--api-key`, `--admin-api-key`) that is not ASCII is answered with a 500, and `/server_info` shows all keys to
  whoever has the lesser one, or to everybody if there is none.
- Responses that are stored, with the messages before them, so that others may follow, are never forgotten. Here the
  least recently used are forgotten once all take `CAPACITY` bytes. Following one of these gives a 404.
- With several tokenizer workers, each has a registry of adapters of its own: the others would go on sending the id of
  an adapter that one of them has unloaded, which ends the scheduler.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.utils.auth import AuthDecision
from starlette.background import BackgroundTask

from sglang_lazy.core.remembered import Field, Remembered, deep_size
from sglang_lazy.port.hooks import Hooks
from sglang_lazy.serving.keys import without_secrets

SECONDS = 2
"""How long after a stream has ended its request is aborted."""
_BEGUN = "_sglang_lazy_begun"
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Flags whose values open something."""
CAPACITY = 1 << 28
"""256 MiB."""
HOOKS = Hooks()
_ABORTS = "a stream that has ended aborts nobody else's request", "SGLang's task knows whether its request still runs"
_TOKENIZER_MANAGER = HOOKS.on("sglang.srt.managers.tokenizer_manager.TokenizerManager")


@_TOKENIZER_MANAGER.repair("_init_req_state", "AFTER", *_ABORTS)
def begin(_result: Any, manager: Any, obj: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `TokenizerManager._init_req_state`, which refuses ids in use: keep this request's states."""
    rids = obj.rid if isinstance(obj.rid, list) else [obj.rid]
    setattr(obj, _BEGUN, {rid: manager.rid_to_state[rid] for rid in rids})


@_TOKENIZER_MANAGER.repair("create_abort_task", "AROUND", *_ABORTS)
def create_abort_task(_create: Any, manager: Any, obj: Any) -> BackgroundTask:
    """Abort what still runs of this request."""

    async def abort() -> None:
        await asyncio.sleep(SECONDS)
        for rid, state in getattr(obj, _BEGUN, {}).items():
            if manager.rid_to_state.get(rid) is state:
                manager.abort_request(rid)

    return BackgroundTask(abort)


@HOOKS.on("sglang.srt.utils.auth").repair(
    "decide_request_auth",
    "AROUND",
    "API keys that are not ASCII",
    "SGLang compares keys as bytes (sglang#38122)",
)
def decide(original: Callable, **request: Any) -> AuthDecision:
    """A key that is not ASCII is a wrong one. Comparing it raises TypeError."""
    try:
        return original(**request)
    except TypeError:
        return AuthDecision(allowed=False)


@HOOKS.on("sglang.srt.sampling.watermarking.core").repair(
    "redact_watermark_secrets", "AROUND", "`/server_info` shows no keys", "SGLang hides them (sglang#39449)"
)
def hide(original: Callable, value: Any, **options: Any) -> Any:
    """Around `redact_watermark_secrets`, which goes through all that the server shows of itself: hide keys as well.

    It calls itself for each value of a dictionary, so one level at a time is seen to here.
    """
    result = original(value, **options)
    return without_secrets(result, _SECRETS, "launch_command") if isinstance(result, dict) else result


@HOOKS.on("sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses").repair(
    "__init__", "AFTER", "stored responses take bounded memory", "SGLang bounds them"
)
def bound(_result: Any, serving: Any, *_args: Any, **_kwargs: Any) -> None:
    """Store both in records that are forgotten together."""
    records = Remembered[str, Mapping[str, Any]](CAPACITY, size=lambda key, record: deep_size([key, record]))
    serving.response_store, serving.msg_store = Field(records, "response"), Field(records, "messages")


@HOOKS.on("sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin").repair(
    ("load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter"),
    "AROUND",
    "no adapter is loaded for one of several tokenizer workers alone",
    "SGLang's workers share a registry (sglang#31084)",
)
async def refuse_with_workers(change: Callable, manager: Any, obj: Any, *args: Any) -> Any:
    """Around calls that load or unload an adapter: refuse them with several tokenizer workers."""
    if manager.server_args.tokenizer_worker_num == 1:
        return await change(manager, obj, *args)
    reason = "with several tokenizer workers, adapters cannot be loaded or unloaded: name them in --lora-paths"
    return LoRAUpdateOutput(success=False, error_message=reason)

"""The state of an HTTP process or an `Engine`, and SGLang's tokenizer manager as the `Server` behind it.

The process of our command spawns tokenizer workers, so that each imports the command first and has all hooks; it also
keeps the state that they share.
"""

import asyncio
import functools
import os
import sys
import time
from collections.abc import Mapping
from contextlib import aclosing
from operator import attrgetter
from typing import Any

from fastapi import HTTPException
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput, unwrap_from_pickle, wrap_as_pickle
from sglang.srt.managers.multi_tokenizer_mixin import MultiTokenizerRouter, TokenizerWorker
from sglang.srt.utils import kill_itself_when_parent_died
from sglang.utils import TypeBasedDispatcher

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.port.facts import dp_size
from sglang_lazy.port.scheduler.control import ChunksReqInput, ChunksReqOutput
from sglang_lazy.serving.frontend import Frontend, shared_state
from sglang_lazy.serving.server import Repeated

_ATTR = "_sglang_lazy_frontend"
_COMMAND = "sglang_lazy.launch_server"
_ADDRESS = "SGLANG_LAZY_SHARED"
"""Environment variable with the address of the state that tokenizer workers share."""


def frontend_of(manager: Any) -> Frontend:
    """The state of the process with this tokenizer manager, made at first use."""
    frontend: Frontend | None = getattr(manager, _ATTR, None)
    if frontend is None:
        frontend = Frontend(LazyConfig.current(), ManagedServer(manager))
        setattr(manager, _ATTR, frontend)
    return frontend


def current() -> Frontend:
    """The state of this HTTP process."""
    return frontend_of(http_server.get_global_state().tokenizer_manager)


class ManagedServer:
    """The `Server` of a tokenizer manager."""

    tokenizer = property(attrgetter("_manager.tokenizer"))
    vocab_size = property(attrgetter("_manager.model_config.vocab_size"))
    context_len = property(attrgetter("_manager.context_len"))
    truncates = property(attrgetter("_manager.allow_auto_truncate"))
    model_path = property(attrgetter("_manager.model_path"))
    num_workers = property(attrgetter("_manager.server_args.tokenizer_worker_num"))
    is_ending = property(attrgetter("_manager.gracefully_exit"))

    def __init__(self, manager: Any):
        self._manager = manager

    @property
    def default_params(self) -> Mapping[str, Any]:
        return self._manager.preferred_sampling_params or {}

    @property
    def adapters(self) -> Mapping[str, str]:
        return {name: ref.lora_id for name, ref in self._manager.lora_registry.get_all_adapters().items()}

    @property
    def has_admin_key(self) -> bool:
        return bool(self._manager.server_args.admin_api_key)

    @property
    def is_idle(self) -> bool:
        return not (self._manager.rid_to_state or self._manager.is_pause)

    @functools.cached_property
    def _communicator(self) -> Any:
        """Sends our messages, and takes the schedulers' answers."""
        made: Any = FanOutCommunicator(self._manager._dispatch_to_scheduler, dp_size())
        self._manager._result_dispatcher += TypeBasedDispatcher([(ChunksReqOutput, made.handle_recv)])
        return made

    async def ask(self, verb: str, **arguments: Any) -> list[dict[str, Any]]:
        self._manager.auto_create_handle_loop()
        message = ChunksReqInput(verb=verb, arguments=wrap_as_pickle(arguments), now=time.time())
        # A cancelled caller must keep its turn until its answer arrives, or the next caller would get that answer.
        outputs = await asyncio.shield(self._communicator(message))
        if any(output.answer is None for output in outputs):
            raise ValueError("this server runs without chunk reuse, so it has no chunks")
        outputs.sort(key=lambda output: output.dp_rank)
        return [unwrap_from_pickle(output.answer) for output in outputs]

    async def compute(self, input_ids: list[int], params: dict[str, Any], adapter: str | None) -> str | None:
        request = GenerateReqInput(input_ids=input_ids, sampling_params=params, lora_path=adapter, log_metrics=False)
        try:
            async for _ in self._manager.generate_request(request):
                pass
        except HTTPException as error:  # it was aborted or timed out
            raise ValueError(str(error.detail)) from None
        return request.lora_id

    async def repeat(self, request: Any, rid: str, input_ids: list[int], params: dict[str, Any]) -> Repeated:
        again = GenerateReqInput(
            rid=rid,
            input_ids=list(input_ids),
            sampling_params=params,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
            lora_path=request.lora_path,
            custom_logit_processor=request.custom_logit_processor,
            require_reasoning=request.require_reasoning,
            max_thinking_tokens=request.max_thinking_tokens,
            log_metrics=False,  # kept out of SGLang's metrics of requests
        )
        async with aclosing(self._manager.generate_request(again)) as outputs:
            out = await anext(outputs)
        return Repeated(out["meta_info"]["finish_reason"], out.get("output_ids", []))

    async def flush(self, timeout_s: float) -> bool:
        return (await self._manager.flush_cache(timeout_s=timeout_s)).success

    def abort(self, rid: str) -> bool:
        state = self._manager.rid_to_state.get(rid)
        if state is None:
            return False
        state.abort_requested = True
        # `abort_request` would count it among the users' aborted requests.
        self._manager._dispatch_to_scheduler(AbortReq(rid=rid))
        return True


def share(manager: Any) -> None:
    """Share state between tokenizer workers: called first by the process that spawns them, and then by each.

    Raises RuntimeError in a process whose workers would lack the hooks.
    """
    if isinstance(manager, MultiTokenizerRouter):
        if getattr(sys.modules["__main__"].__spec__, "name", None) != _COMMAND:
            raise RuntimeError(f"several tokenizer workers need a server that python -m {_COMMAND} has started")
        os.environ[_ADDRESS] = shared_state()
    elif isinstance(manager, TokenizerWorker):
        kill_itself_when_parent_died()  # it would go on listening, and nobody would answer
        frontend_of(manager).use_shared(os.environ[_ADDRESS])

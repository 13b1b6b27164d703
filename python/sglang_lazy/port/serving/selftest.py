"""The self-test of a server or an engine as it starts: every required hook has run once.

A hook on something that SGLang no longer calls changes nothing, and nothing else would tell.
"""

import asyncio
from typing import Any

from sglang.srt.entrypoints.warmup import warmup
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_lazy.port import hooks
from sglang_lazy.port.facts import dp_size
from sglang_lazy.port.scheduler.control import UNUSED_HOOKS
from sglang_lazy.port.serving.frontend import frontend_of

NAME = "sglang_lazy"
PATIENCE = 10
"""Seconds that a scheduler may take until it is idle again."""


@warmup(NAME)
async def of_server(_disaggregation_mode: str, manager: Any) -> None:
    """Before an HTTP process takes requests, with or without SGLang's own warm-up."""
    await check(manager, "http", "tokenizer")


def of_engine(engine: Any) -> None:
    """Once an `Engine` is up. Ends it if that raises RuntimeError."""
    try:
        engine.loop.run_until_complete(check(engine.tokenizer_manager, "tokenizer"))
    except RuntimeError:
        engine.shutdown()
        raise


async def check(manager: Any, *processes: hooks.Process) -> None:
    """Serve a tiny prompt. With the fallback, do nothing: SGLang may serve alone.

    processes: what this process is.
    Raises RuntimeError naming the required hooks that have not run by then, here or in a scheduler.
    """
    if frontend_of(manager).config.fallback:
        return
    ranks = range(dp_size()) if dp_size() > 1 else [None]
    params = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
    for rank in ranks:
        request = GenerateReqInput(input_ids=[0], sampling_params=dict(params), routed_dp_rank=rank, log_metrics=False)
        async for _ in manager.generate_request(request):
            pass
    if unused := hooks.unused(*processes) or await _unused_in_schedulers(manager):
        raise RuntimeError(f"sglang-lazy cannot serve: SGLang does not call what these hooks are on: {unused}")


async def _unused_in_schedulers(manager: Any) -> list[str]:
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while True:
        answers = await frontend_of(manager).server.ask(UNUSED_HOOKS)
        unused = list(dict.fromkeys(target for answer in answers for target in answer["unused"]))
        if not unused or asyncio.get_running_loop().time() > deadline:
            return unused
        await asyncio.sleep(0.1)

"""Shadow mode: some greedy answers over chunks are made again with link full; the metrics say how often both agree.

Users do not wait for a shadow: it starts when no request is under way, is aborted when one arrives, and starts over at
the next quiet moment; there is one at a time. What remains: a request that arrives while a pass of the shadow is being
computed waits for the end of that pass, and the shadow's prompt takes space in the cache.
"""

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.serving.requests import with_layout

logger = logging.getLogger(__name__)

COUNTERS = {
    "requests": "Greedy answers over chunks that were also made with link full, and compared.",
    "identical_answers": "Compared answers in which every token was the same.",
    "first_token_agreements": "Compared answers in which the first token was the same.",
    "dropped": "Chosen answers not compared: another shadow was under way, or this one had to make an idle server.",
    "failed": "Chosen answers not compared: the shadow ended in an error, which the log shows.",
    "ineligible": "Answers over chunks that are never compared: sampled ones, and several for one prompt.",
}
_ATTR = "_sglang_lazy_shadow"
_QUIET_S = 0.05
"""How long the server must have been asked nothing; a client's next request often follows its last answer at once."""


class Shadow:
    """Chooses answers, makes them again one after the other, and counts. Lives in the event loop of the HTTP server.

    counters: Prometheus counters by the names in `COUNTERS`.
    """

    def __init__(self, manager: Any, rate: float, counters: dict[str, Any]):
        self.manager = manager
        self.rate = rate
        self.counters = counters
        # Drawn, so that no period in the traffic meets one in the choice; seeded, so that a run can be repeated.
        self._random = random.Random(0)
        self._task: asyncio.Task | None = None
        self._rid: str | None = None  # of the shadow's request, while SGLang has it
        self._interrupted = self._cancelled = False

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def offer(self, obj: Any, layout: PromptLayout, answer: list[int]) -> None:
        """Take a finished answer over chunks, `answer` to request `obj`, for comparison, or leave it."""
        params = obj.sampling_params
        if params.get("n", 1) > 1 or (params.get("temperature") != 0 and params.get("top_k") != 1):
            self.counters["ineligible"].inc()
        elif self._random.random() < self.rate:
            if self.under_way:
                self.counters["dropped"].inc()
            else:
                self._cancelled = False
                self._task = asyncio.create_task(self._compare(obj, layout.cache_salt, list(answer)))

    def interrupt(self) -> None:
        """Abort the shadow's request, if there is one; it will be made again."""
        state = self.manager.rid_to_state.get(self._rid)
        if state is not None:
            from sglang.srt.managers.io_struct import AbortReq

            self._interrupted = state.abort_requested = True
            # Not by `abort_request`, which would count it among the users' aborted requests.
            self.manager._dispatch_to_scheduler(AbortReq(rid=self._rid))

    def cancel(self) -> None:
        """Make no more attempts at the comparison under way."""
        self._cancelled = True

    async def stop(self) -> None:
        """Cancel the comparison under way and wait until SGLang has nothing more of it."""
        self.cancel()
        self.interrupt()
        await asyncio.wait([self._task])

    async def _compare(self, obj: Any, salt: str | None, answer: list[int]) -> None:
        try:
            tokens = await self._answer(obj, salt)
        except Exception:
            logger.exception("sglang-lazy: a shadow of request %s failed", obj.rid)
            self.counters["failed"].inc()
            return
        if tokens is None:
            self.counters["dropped"].inc()
            return
        self.counters["requests"].inc()
        if tokens == answer:
            self.counters["identical_answers"].inc()
        if tokens[:1] == answer[:1]:
            self.counters["first_token_agreements"].inc()

    async def _answer(self, obj: Any, salt: str | None) -> list[int] | None:
        """The tokens that link full gives; None if this was cancelled."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        while await self._quiet():
            self._interrupted = False
            self._rid = f"lazy-shadow-{uuid.uuid4().hex}"
            request = GenerateReqInput(
                rid=self._rid,
                input_ids=list(obj.input_ids),
                sampling_params=with_layout(obj.sampling_params, PromptLayout((), salt, "full"), self.manager),
                extra_key=obj.extra_key,
                custom_logit_processor=obj.custom_logit_processor,
                require_reasoning=obj.require_reasoning,
                max_thinking_tokens=obj.max_thinking_tokens,
                log_metrics=False,  # SGLang's metrics of requests are about the users'
            )
            try:
                async with aclosing(self.manager.generate_request(request)) as outputs:
                    out = await anext(outputs)
                finish_reason = out["meta_info"]["finish_reason"]
                if finish_reason["type"] != "abort":
                    return out["output_ids"]
                raise RuntimeError(f"it was aborted: {finish_reason.get('message')}")
            except Exception:
                if not (self._interrupted or self._cancelled):
                    raise
            finally:
                self._rid = None
        return None

    async def _quiet(self) -> bool:
        """Wait for a moment without requests. False if this was cancelled, or the server is about to end."""
        while not (self._cancelled or self.manager.gracefully_exit):
            await asyncio.sleep(_QUIET_S)
            if not (self.manager.rid_to_state or self.manager.is_pause or self._cancelled):
                return True
        return False


def attach(_result: Any, global_state: Any) -> None:
    """Hook after `http_server.set_global_state`: start shadow mode if it was asked for."""
    config, manager = LazyConfig.from_env(), global_state.tokenizer_manager
    if not config.shadow_rate:
        return
    from prometheus_client import Counter  # not before SGLang has set up its directory of metrics

    labels = manager.metrics_collector.labels
    counters = {
        name: Counter(f"sglang_lazy:shadow_{name}_total", text, list(labels)).labels(**labels)
        for name, text in COUNTERS.items()
    }
    setattr(manager, _ATTR, Shadow(manager, config.shadow_rate, counters))


def shadow_of(manager: Any) -> Shadow | None:
    """The shadow mode of a tokenizer manager, None where it is off."""
    return getattr(manager, _ATTR, None)


def shadowed(
    outputs: AsyncIterator[dict], manager: Any, obj: Any, layout: PromptLayout, state: Any
) -> AsyncIterator[dict]:
    """`outputs` of a request with chunks, whose answer is offered to the shadow before the user gets the last one.

    state: SGLang's state of the request, in which the answer's tokens collect, streamed or not.
    """
    shadow = shadow_of(manager)
    return outputs if shadow is None or layout.link == "full" else _offer(outputs, shadow, obj, layout, state)


async def _offer(
    outputs: AsyncIterator[dict], shadow: Shadow, obj: Any, layout: PromptLayout, state: Any
) -> AsyncIterator[dict]:
    async with aclosing(outputs):
        async for out in outputs:
            finish_reason = out["meta_info"]["finish_reason"]
            if finish_reason is not None and finish_reason["type"] != "abort" and state.output_ids:
                shadow.offer(obj, layout, state.output_ids)
            yield out


def give_way(manager: Any, obj: Any, _input_ids: Any) -> None:
    """Hook before `TokenizerManager._validate_one_request`: a request arrives, so the shadow ends."""
    shadow = shadow_of(manager)
    if shadow is not None and obj.rid != shadow._rid:
        shadow.interrupt()


def abort_with_all(manager: Any, rid: str = "", abort_all: bool = False) -> None:
    """Hook before `TokenizerManager.abort_request`: where all requests are aborted, no shadow comes after them."""
    shadow = shadow_of(manager)
    if shadow is not None and abort_all:
        shadow.cancel()


async def make_idle(original: Callable, manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around what SGLang refuses on a server that is not idle, or waits for that: operators know of no shadow."""
    shadow = shadow_of(manager)
    if shadow is not None and shadow.under_way:
        await shadow.stop()
        await manager.get_internal_state()  # answered when the scheduler's last batch is over
    return await original(manager, *args, **kwargs)

"""Shadow mode: repeat some greedy answers over chunks with link full, and watch how often both agree.

Users do not wait for a shadow. There is one at a time; it starts when no request is running, is aborted when one
arrives, and starts over when the server is idle again. Two costs remain: a request that arrives during a forward pass
of the shadow waits for the end of that pass, and the shadow's prompt takes space in the cache.
"""

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

from sglang_lazy.policies import get_policy
from sglang_lazy.serving.agreement import GAUGES, RecentAgreement
from sglang_lazy.serving.plans import Plan
from sglang_lazy.serving.prompts import Prompts
from sglang_lazy.serving.results import Served

logger = logging.getLogger(__name__)

COUNTERS = {
    "requests": "Greedy answers over chunks that were repeated with link full and compared.",
    "identical_answers": "Compared answers in which every token was the same.",
    "first_token_agreements": "Compared answers in which the first token was the same.",
    "dropped": "Chosen answers not compared: another shadow was running, or this one was cancelled.",
    "failed": "Chosen answers not compared: the shadow ended in an error, which the log shows.",
    "ineligible": "Answers over chunks that are never compared: sampled, with images, or several for one prompt.",
}
_QUIET_S = 0.05
"""How long the server must have been idle: a client often sends its next request right after the last answer."""


class Shadow:
    """Chooses answers, repeats them one at a time, and counts. Lives in the event loop of the HTTP server.

    prompts: makes the shadows' prompts.
    rate: fraction of the eligible answers to compare.
    counters: Prometheus counters by the names in `COUNTERS`.
    recent: tracks the agreement of each policy.
    """

    def __init__(self, prompts: Prompts, rate: float, counters: Mapping[str, Any], recent: RecentAgreement):
        self.prompts, self.server = prompts, prompts.server
        self.rate = rate
        self.counters = counters
        self.recent = recent
        self.rid: str | None = None
        """Id of the shadow's request while SGLang has it."""
        # Random, so that no period in the traffic can meet one in the choice; seeded, so that runs can be repeated.
        self._random = random.Random(0)
        self._task: asyncio.Task | None = None
        self._interrupted = self._cancelled = False

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def offer(self, served: Served, answer: list[int]) -> None:
        """Choose at random whether to compare a finished answer over chunks.  answer: its tokens."""
        params = served.params
        sampled = params.get("temperature") != 0 and params.get("top_k") != 1
        if sampled or params.get("n", 1) > 1 or served.has_images:
            self.counters["ineligible"].inc()
        elif self._random.random() < self.rate:
            if self.under_way:
                self.counters["dropped"].inc()
            else:
                self._cancelled = False
                self._task = asyncio.create_task(self._compare(served, list(answer)))

    def interrupt(self) -> None:
        """Abort the shadow's request, if there is one; it will be repeated."""
        if self.rid is not None and self.server.abort(self.rid):
            self._interrupted = True

    def give_way(self, rid: str) -> None:
        """Interrupt for a request that has arrived, unless it is the shadow's own."""
        if rid != self.rid:
            self.interrupt()

    def cancel(self) -> None:
        """Give up the current comparison, without aborting its request."""
        self._cancelled = True

    async def stop(self) -> None:
        """Cancel the current comparison, and wait until SGLang has released its request."""
        self.cancel()
        self.interrupt()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _compare(self, served: Served, answer: list[int]) -> None:
        try:
            tokens = await self._answer(served)
        except Exception:  # the user has the answer already: whatever fails here is only counted
            logger.exception("sglang-lazy: a shadow of request %s failed", served.rid)
            self.counters["failed"].inc()
            return
        if tokens is None:
            self.counters["dropped"].inc()
            return
        self.counters["requests"].inc()
        same_answer, same_first_token = tokens == answer, tokens[:1] == answer[:1]
        if same_answer:
            self.counters["identical_answers"].inc()
        if same_first_token:
            self.counters["first_token_agreements"].inc()
        self.recent.add(served.plan.layout.link, same_answer, same_first_token)

    async def _answer(self, served: Served) -> list[int] | None:
        """The tokens that link full gives; None if this was cancelled."""
        prompt = self.prompts.without_trained_tokens(served.input_ids, served.plan)
        full = Plan.of(prompt.chunks, get_policy("full"))  # the cache salt is the request's by now
        while await self._quiet():
            self._interrupted = False
            self.rid = f"lazy-shadow-{uuid.uuid4().hex}"
            params = self.prompts.with_plan(served.params, full)
            try:
                answer = await self.server.repeat(served.request, self.rid, prompt.input_ids, params)
                if answer.finish_reason["type"] != "abort":
                    return answer.tokens
                raise RuntimeError(f"it was aborted: {answer.finish_reason.get('message')}")
            except Exception:  # an aborted request may end in any exception of SGLang's
                if not (self._interrupted or self._cancelled):
                    raise
            finally:
                self.rid = None
        return None

    async def _quiet(self) -> bool:
        """Wait until no request is running. False if this was cancelled or the server is about to end."""
        while not (self._cancelled or self.server.is_ending):
            await asyncio.sleep(_QUIET_S)
            if self.server.is_idle and not self._cancelled:
                return True
        return False


async def shadowed(
    outputs: AsyncGenerator[dict, None], shadow: Shadow, served: Served, answer: Callable[[], list[int]]
) -> AsyncGenerator[dict, None]:
    """`outputs` of a request that reuses chunks; its answer is offered to `shadow` before the user gets the last one.

    answer: returns the answer's tokens so far, streamed or not.
    """
    async with aclosing(outputs):
        async for out in outputs:
            finish_reason = out["meta_info"]["finish_reason"]
            if finish_reason is not None and finish_reason["type"] != "abort" and (tokens := answer()):
                shadow.offer(served, tokens)
            yield out


def measured_shadow(prompts: Prompts, rate: float, min_agreement: float, labels: Mapping[str, str]) -> Shadow:
    """A shadow whose counts are on /metrics.

    rate: see `Shadow`.  min_agreement: see `RecentAgreement`.  labels: of all metrics of this process.
    """
    from prometheus_client import Counter, Gauge  # not before SGLang has set up its directory of metrics

    counters = {
        name: Counter(f"sglang_lazy:shadow_{name}_total", text, list(labels)).labels(**labels)
        for name, text in COUNTERS.items()
    }
    gauges = {
        name: Gauge(f"sglang_lazy:shadow_{name}", text, [*labels, *own], multiprocess_mode="mostrecent")
        for name, (text, own) in GAUGES.items()
    }

    def publish(name: str, value: float, **own: str) -> None:
        gauges[name].labels(**labels, **own).set(value)

    return Shadow(prompts, rate, counters, RecentAgreement(min_agreement, publish))

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

from sglang_lazy.core.segments import PromptLayout
from sglang_lazy.serving.agreement import RecentAgreement
from sglang_lazy.serving.requests import with_layout, without_trained_tokens

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

    manager: SGLang's tokenizer manager.
    rate: fraction of the eligible answers to compare.
    counters: Prometheus counters by the names in `COUNTERS`.
    recent: tracks the agreement of each policy.
    new_request: makes SGLang's request from a user's request, a request id, token ids and sampling parameters.
    abort: aborts the request with this id.
    """

    def __init__(
        self,
        manager: Any,
        rate: float,
        counters: Mapping[str, Any],
        recent: RecentAgreement,
        new_request: Callable[[Any, str, list[int], dict[str, Any]], Any],
        abort: Callable[[str], None],
    ):
        self.manager = manager
        self.rate = rate
        self.counters = counters
        self.recent = recent
        self.rid: str | None = None
        """Id of the shadow's request while SGLang has it."""
        self._new_request = new_request
        self._abort = abort
        # Random, so that no period in the traffic can meet one in the choice; seeded, so that runs can be repeated.
        self._random = random.Random(0)
        self._task: asyncio.Task | None = None
        self._interrupted = self._cancelled = False

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def offer(self, obj: Any, layout: PromptLayout, answer: list[int]) -> None:
        """Choose at random whether to compare a finished answer over chunks.  obj: its request.  answer: its tokens."""
        params = obj.sampling_params
        sampled = params.get("temperature") != 0 and params.get("top_k") != 1
        if sampled or params.get("n", 1) > 1 or obj.image_data:
            self.counters["ineligible"].inc()
        elif self._random.random() < self.rate:
            if self.under_way:
                self.counters["dropped"].inc()
            else:
                self._cancelled = False
                self._task = asyncio.create_task(self._compare(obj, layout, list(answer)))

    def interrupt(self) -> None:
        """Abort the shadow's request, if there is one; it will be repeated."""
        if self.rid is not None and (state := self.manager.rid_to_state.get(self.rid)) is not None:
            self._interrupted = state.abort_requested = True
            self._abort(self.rid)

    def cancel(self) -> None:
        """Give up the current comparison, without aborting its request."""
        self._cancelled = True

    async def stop(self) -> None:
        """Cancel the current comparison, and wait until SGLang has released its request."""
        self.cancel()
        self.interrupt()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _compare(self, obj: Any, layout: PromptLayout, answer: list[int]) -> None:
        try:
            tokens = await self._answer(obj, layout)
        except Exception:  # the user has the answer already: whatever fails here is only counted
            logger.exception("sglang-lazy: a shadow of request %s failed", obj.rid)
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
        self.recent.add(layout.link, same_answer, same_first_token)

    async def _answer(self, obj: Any, layout: PromptLayout) -> list[int] | None:
        """The tokens that link full gives; None if this was cancelled."""
        prompt = without_trained_tokens(self.manager, obj.input_ids, layout)
        full = PromptLayout(prompt.chunks, link="full")  # the cache salt is the request's by now
        while await self._quiet():
            self._interrupted = False
            self.rid = f"lazy-shadow-{uuid.uuid4().hex}"
            params = with_layout(obj.sampling_params, full, self.manager)
            request = self._new_request(obj, self.rid, prompt.input_ids, params)
            try:
                async with aclosing(self.manager.generate_request(request)) as outputs:
                    out = await anext(outputs)
                finish_reason = out["meta_info"]["finish_reason"]
                if finish_reason["type"] != "abort":
                    return out["output_ids"]
                raise RuntimeError(f"it was aborted: {finish_reason.get('message')}")
            except Exception:  # an aborted request may end in any exception of SGLang's
                if not (self._interrupted or self._cancelled):
                    raise
            finally:
                self.rid = None
        return None

    async def _quiet(self) -> bool:
        """Wait until no request is running. False if this was cancelled or the server is about to end."""
        while not (self._cancelled or self.manager.gracefully_exit):
            await asyncio.sleep(_QUIET_S)
            if not (self.manager.rid_to_state or self.manager.is_pause or self._cancelled):
                return True
        return False


async def shadowed(
    outputs: AsyncGenerator[dict, None], shadow: Shadow, obj: Any, layout: PromptLayout, state: Any
) -> AsyncGenerator[dict, None]:
    """`outputs` of a request that reuses chunks; its answer is offered to `shadow` before the user gets the last one.

    state: SGLang's state of the request, which collects the answer's tokens, streamed or not.
    """
    async with aclosing(outputs):
        async for out in outputs:
            finish_reason = out["meta_info"]["finish_reason"]
            if finish_reason is not None and finish_reason["type"] != "abort" and state.output_ids:
                shadow.offer(obj, layout, state.output_ids)
            yield out

"""Sends the conversations of a stage as a Poisson process and collects the client's timelines."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np

from benchmark.serving.client import Timeline, encode, new_session, stream
from benchmark.serving.prompts import text
from benchmark.serving.sglang_bench import get_request
from benchmark.serving.workloads import Conversation


def send(
    url: str,
    conversations: list[Conversation],
    form: Callable[[list[dict]], dict],
    *,
    request_rate: float,
    max_concurrency: int | None,
    seed: int,
) -> list[Timeline]:
    """Returns a timeline for each turn. If a request fails, cancels the others and raises ServerError.

    form: turns segments into the prompt fields of `/generate`.
    request_rate: conversations that arrive per second, exponentially spaced; infinity sends all of them at once.
    max_concurrency: the most requests in flight. The clock of a request starts when it is sent, not while it waits.
    """
    np.random.seed(seed)  # SGLang's arrivals draw from NumPy's global generator
    return asyncio.run(_send(url, conversations, form, request_rate, max_concurrency))


async def _send(url, conversations, form, request_rate, max_concurrency) -> list[Timeline]:
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    async with new_session() as session:

        async def converse(conversation: Conversation) -> list[Timeline]:
            prompt, timelines = [], []
            for number, turn in enumerate(conversation, 1):
                prompt += turn.segments
                async with limit:
                    timeline = await stream(session, url, encode(form(prompt), turn.output_len))
                timelines.append(dataclasses.replace(timeline, turn=number))
                prompt.append(text(timelines[-1].output_ids))
            return timelines

        tasks = []
        async for conversation in get_request(conversations, request_rate):
            tasks.append(asyncio.create_task(converse(conversation)))
        try:
            return [timeline for timelines in await asyncio.gather(*tasks) for timeline in timelines]
        finally:
            for task in tasks:
                task.cancel()

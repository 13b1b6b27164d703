"""Streams that fail before they begin: answer with an error and its HTTP status, in the format of each API."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from fastapi import Response
from fastapi.responses import ORJSONResponse, StreamingResponse

REQUEST_SENT: ContextVar[asyncio.Future | None] = ContextVar("REQUEST_SENT", default=None)
"""A future for this context's request: None once it is sent to the scheduler, or the error if it is refused before."""


def announce(error: ValueError | None) -> None:
    """Report that this context's request has been sent, or the error that prevented it."""
    sent = REQUEST_SENT.get()
    if sent is not None and not sent.done():
        sent.set_result(error)


async def fail_before_stream(response: Any, refuse: Callable[[str], Response] | None = None) -> Any:
    """`response`, or an error with its HTTP status for a stream that fails before its request reaches the scheduler.

    refuse: makes an error response of its reason, for APIs whose streams begin with events that do not show success.
        These are held back until the request has been sent.

    Otherwise, streams of batches and of several samples are held back until their first event. The head of any other
    stream is sent as soon as the request has been: a client takes half a millisecond to read it.
    """
    if not isinstance(response, StreamingResponse):
        return response
    events: Any = response.body_iterator
    sent = asyncio.get_running_loop().create_future()
    REQUEST_SENT.set(sent)
    opening: list[Any] = []
    while True:
        first = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait((first, sent), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            first.cancel()
            raise
        if refuse is None or sent.done() or first.result() is None:
            break
        opening.append(first.result())
    refused = sent.result() if sent.done() else None
    if refused is not None:
        await asyncio.wait((first,))  # a running generator cannot be closed; its next event is the error
        if refuse is not None:
            await events.aclose()
            return refuse(str(refused))
    if first.done():
        if first.result() is None and not opening:  # the client went away
            return Response(status_code=499)
        error = None if first.result() is None else _error_in(first.result())
        if error is not None:
            await events.aclose()
            code = error.get("code")
            status = code if isinstance(code, int) else HTTPStatus.BAD_REQUEST
            return ORJSONResponse({"error": error}, status_code=status)
    response.body_iterator = _resume(opening, first, events)
    return response


def _error_in(event: Any) -> dict[str, Any] | None:
    payload = event.decode() if isinstance(event, bytes) else event
    payload = payload.removeprefix("data:").strip()
    if not payload.startswith('{"error"'):
        return None
    return json.loads(payload)["error"]


async def with_logprobs(outputs: AsyncGenerator[dict, None]) -> AsyncGenerator[dict, None]:
    """`outputs` of a stream with logprobs, with empty logprobs added to a request aborted before it ran.

    SGLang's completions and chats read them before they check for an abort, and would send an event with code 500.
    """
    async with aclosing(outputs):
        async for out in outputs:
            meta_info = out["meta_info"]
            if (meta_info.get("finish_reason") or {}).get("type") == "abort":
                meta_info.setdefault("output_token_logprobs_length", 0)
                for name in ("input_token", "input_top", "output_token"):
                    meta_info.setdefault(f"{name}_logprobs", [])
            yield out


async def _resume(opening: list[Any], first: asyncio.Future, events: AsyncIterator) -> AsyncIterator:
    for event in opening:
        yield event
    event = await first
    if event is not None:
        yield event
    async for event in events:
        yield event

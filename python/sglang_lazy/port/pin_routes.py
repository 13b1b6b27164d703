"""The route that pins a tenant's chunks, and the end of pins: this process has the clock that all ranks go by."""

import asyncio
import contextlib
import time
from http import HTTPStatus
from typing import Any

from fastapi import HTTPException, Request
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_lazy.port.control import ask
from sglang_lazy.serving.chunk_lists import check_id, pin_arguments
from sglang_lazy.serving.requests import SALT_HEADER, check_cache_salt, salt_of

_ATTR = "_sglang_lazy_end_of_pins"


@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def patch_chunk(request: Request, chunk_id: str, cache_salt: str | None = None) -> dict[str, Any]:
    """Pin a cached chunk, which keeps its KV on the device, or end its pin.

        {"pin": true, "ttl": 3600}

    ttl: the pin ends so many seconds after it was set or the chunk was last found by a prompt; a hit may lengthen it to
        twice that. null, or none: it stays until it is ended. What was set last holds.

    Answers `{"requested": 1, "affected": [{"id": "9f0c…", "pinned": true, "pinned_until": 1763903600.1}], "skipped":
    []}`, with 409 where it cannot be pinned. Pins end where nothing else would make room for a request that runs alone.
    """
    manager = http_server.get_global_state().tokenizer_manager
    try:
        try:
            body = await request.json()
        except ValueError:
            raise ValueError("the body is no JSON") from None
        pin, ttl = pin_arguments(body)
        tenant = check_cache_salt(salt_of(cache_salt, request.headers.get(SALT_HEADER)))
        affected, skipped = await pin_chunks(manager, tenant, [check_id(chunk_id)], pin, ttl)
    except ValueError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from None
    if affected:
        return {"requested": 1, "affected": affected, "skipped": []}
    reason = skipped[0]["reason"]
    if reason == "unknown":
        raise HTTPException(HTTPStatus.NOT_FOUND, f"chunk {chunk_id} is unknown, or not cached")
    raise HTTPException(HTTPStatus.CONFLICT, f"chunk {chunk_id}: {reason}")


async def pin_chunks(
    manager: Any,
    tenant: str | None,
    ids: list[str],
    pin: bool,
    ttl: float | None,
    only: tuple[bool, str | None] | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What became of each chunk: those that were pinned, or whose pin has ended, on any data-parallel rank, and the
    others with their reasons. See `ChunkControl.pin`.
    """
    message = {"tenant": tenant, "ids": ids, "pin": pin, "ttl": ttl, "only": only}
    answers = await ask(manager, "pin", **message, now=time.time())
    _end_in_time(manager, answers)
    affected = {one["id"]: one for answer in answers for one in answer["affected"]}
    skipped: dict[str, dict[str, Any]] = {}
    for one in (one for answer in answers for one in answer["skipped"] if one["id"] not in affected):
        if skipped.get(one["id"], {"reason": "unknown"})["reason"] == "unknown":
            skipped[one["id"]] = one
    return list(affected.values()), list(skipped.values())


def _end_in_time(manager: Any, answers: list[dict[str, Any]]) -> None:
    """Have pins ended when their time is over. `answers` say when the next one may be."""
    waits = [answer["next"] for answer in answers if answer["next"] is not None]
    ends = getattr(manager, _ATTR, None)
    if ends is not None and not ends.task.done():
        ends.changed.set()
    elif waits:
        setattr(manager, _ATTR, _EndOfPins(manager, min(waits)))


class _EndOfPins:
    """Asks the scheduler, when the next pin may have to end, to end those whose time is over; until none is left."""

    def __init__(self, manager: Any, wait: float):
        self.changed = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(manager, wait))

    async def _run(self, manager: Any, wait: float | None) -> None:
        while wait is not None or self.changed.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), wait)
            self.changed.clear()  # what is pinned from here on sets it again
            answers = await ask(manager, "expire", now=time.time())
            wait = min((answer["next"] for answer in answers if answer["next"] is not None), default=None)

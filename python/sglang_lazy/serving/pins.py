"""Pins of chunks and their expiry, by the clock of this process, which all ranks use."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

Ask = Callable[..., Awaitable[list[dict[str, Any]]]]
"""`Server.ask`."""
Names = Callable[[str | None, list[str]], dict[str, str]]


class Pins:
    """Pins chunks, and has the scheduler end expired pins.

    names: returns the names of a tenant's chunks, by the ids of those that have any, for the scheduler's log.
    """

    def __init__(self, ask: Ask, names: Names = lambda _tenant, _ids: {}):
        self._ask, self._names = ask, names
        self._end: _EndOfPins | None = None

    async def set(
        self,
        tenant: str | None,
        ids: list[str],
        pin: bool,
        ttl: float | None,
        only: tuple[bool, str | None] | None = None,
    ) -> dict[str, Any]:
        """Pin chunks or end their pins, see `ChunkControl.pin`.

        Returns `affected`, the chunks for which that was done on any data-parallel rank, and `skipped`, the others with
        their reasons.
        """
        answers = await self._ask(
            "pin", tenant=tenant, ids=ids, pin=pin, ttl=ttl, only=only, names=self._names(tenant, ids)
        )
        self._end_in_time(answers)
        affected = {one["id"]: one for answer in answers for one in answer["affected"]}
        skipped: dict[str, dict[str, Any]] = {}
        for one in (one for answer in answers for one in answer["skipped"] if one["id"] not in affected):
            if skipped.get(one["id"], {"reason": "unknown"})["reason"] == "unknown":
                skipped[one["id"]] = one
        return {"requested": len(ids), "affected": list(affected.values()), "skipped": list(skipped.values())}

    def _end_in_time(self, answers: list[dict[str, Any]]) -> None:
        """Schedule the end of expired pins. `answers` say when the next pin may expire."""
        waits = [answer["next"] for answer in answers if answer["next"] is not None]
        if self._end is not None and not self._end.task.done():
            self._end.changed.set()
        elif waits:
            self._end = _EndOfPins(self._ask, min(waits))


class _EndOfPins:
    """Asks the scheduler to end expired pins whenever one may have expired, until none is left."""

    def __init__(self, ask: Ask, wait: float):
        self.changed = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(ask, wait))

    async def _run(self, ask: Ask, wait: float | None) -> None:
        while wait is not None or self.changed.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed.wait(), wait)
            self.changed.clear()  # pins set from here on set it again
            answers = await ask("expire")
            wait = min((answer["next"] for answer in answers if answer["next"] is not None), default=None)

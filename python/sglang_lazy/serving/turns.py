"""Turns for work that tenants have asked for, so that none keeps the others waiting."""

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable


class Turns:
    """Lets so much work go on `at_once`. When some is done, the next tenant's oldest begins. For one event loop."""

    def __init__(self, at_once: int):
        self._free = at_once
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future]] = OrderedDict()  # by tenant; the next one first

    @contextlib.asynccontextmanager
    async def turn(self, tenant: Hashable) -> AsyncIterator[None]:
        """A context that is entered when it is this tenant's turn."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(tenant)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, tenant: Hashable) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            tenant, turns = next(iter(self._waiting.items()))
            turn = turns.popleft()
            if turns:
                self._waiting.move_to_end(tenant)
            else:
                del self._waiting[tenant]
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1

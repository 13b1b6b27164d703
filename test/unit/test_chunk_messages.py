"""Messages about chunks between the HTTP process and the scheduler: each caller gets the answer to its own."""

import asyncio

import pytest
from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle
from sglang.utils import TypeBasedDispatcher

from sglang_lazy.port.scheduler.control import ChunksReqOutput
from sglang_lazy.port.serving import frontend


class Manager:
    """What a tokenizer manager sends and receives.  sent: the messages."""

    def __init__(self):
        self.sent = []
        self._result_dispatcher = TypeBasedDispatcher([])

    def _dispatch_to_scheduler(self, message):
        self.sent.append(message)

    def auto_create_handle_loop(self):
        pass

    def receive(self, answer, rank):
        self._result_dispatcher(ChunksReqOutput(answer=wrap_as_pickle(answer), dp_rank=rank))


def new_manager(monkeypatch, num_ranks):
    manager = Manager()
    monkeypatch.setattr(frontend, "dp_size", lambda: num_ranks)
    return manager, frontend.frontend_of(manager).server.ask


def test_an_abandoned_call_does_not_confuse_the_next(monkeypatch):
    async def run():
        manager, ask = new_manager(monkeypatch, 1)
        leaves = asyncio.create_task(ask("get", tenant="a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        stays = asyncio.create_task(ask("get", tenant="b"))
        for number in range(2):
            while len(manager.sent) <= number:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            manager.receive(unwrap_from_pickle(manager.sent[number].arguments), 0)
            await asyncio.sleep(0)
        return await asyncio.wait_for(stays, 10)

    assert asyncio.run(run()) == [{"tenant": "b"}]


def test_answers_are_ordered_by_rank(monkeypatch):
    async def run():
        manager, ask = new_manager(monkeypatch, 3)
        asks = asyncio.create_task(ask("get", tenant=None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for rank in (2, 0, 1):
            manager.receive({"of": rank}, rank)
        return await asyncio.wait_for(asks, 10)

    assert asyncio.run(run()) == [{"of": 0}, {"of": 1}, {"of": 2}]

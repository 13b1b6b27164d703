"""Messages about chunks between the HTTP process and the scheduler: each caller gets the answer to its own."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle

from sglang_lazy.port.scheduler import control


def test_an_abandoned_call_does_not_confuse_the_next():
    async def run():
        sent = []
        communicator = FanOutCommunicator(sent.append, 1)
        manager = SimpleNamespace(auto_create_handle_loop=lambda: None)
        setattr(manager, control._COMMUNICATOR, communicator)
        leaves = asyncio.create_task(control.ask(manager, "get", tenant="a"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        stays = asyncio.create_task(control.ask(manager, "get", tenant="b"))
        for number in range(2):
            while len(sent) <= number:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            answer = wrap_as_pickle(unwrap_from_pickle(sent[number].arguments))
            communicator.handle_recv(control.ChunksReqOutput(answer=answer, dp_rank=0))
            await asyncio.sleep(0)
        return await asyncio.wait_for(stays, 10)

    assert asyncio.run(run()) == [{"tenant": "b"}]


def test_answers_are_ordered_by_rank():
    async def run():
        communicator = FanOutCommunicator(lambda _message: None, 3)
        manager = SimpleNamespace(auto_create_handle_loop=lambda: None)
        setattr(manager, control._COMMUNICATOR, communicator)
        asks = asyncio.create_task(control.ask(manager, "get", tenant=None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for rank in (2, 0, 1):
            communicator.handle_recv(control.ChunksReqOutput(answer=wrap_as_pickle({"of": rank}), dp_rank=rank))
        return await asyncio.wait_for(asks, 10)

    assert asyncio.run(run()) == [{"of": 0}, {"of": 1}, {"of": 2}]

"""Registrations: a tenant can ask later what became of each of its chunks, and memory stays bounded."""

import asyncio
from array import array

import pytest

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.serving.registration import MAX_REASON, PER_CHUNK, Busy, Chunk, Registrations, compute
from sglang_lazy.serving.turns import Turns

CHUNKS = [Chunk(tokens_digest(tokens).hex(), array("i", tokens)) for tokens in ([1, 2], [3], [4])]
DIGESTS = [chunk.digest for chunk in CHUNKS]
IDS = [chunk_id(tokens_digest(chunk.tokens)) for chunk in CHUNKS]
SIZED = [(chunk.digest, chunk.size) for chunk in CHUNKS]
WAITING = {"state": "waiting"}


def test_a_registration_waits_then_succeeds_or_fails():
    async def register():
        progress, go_on = Registrations(), asyncio.Event()

        async def run(tokens):
            await go_on.wait()
            if list(tokens) == [3]:
                raise ValueError("too long")

        progress.begin("a", SIZED)
        work = asyncio.ensure_future(compute(CHUNKS, run, progress, "a", Turns(2)))
        await asyncio.sleep(0)
        assert [progress.get("a", name) for name in (*IDS, DIGESTS[0])] == [WAITING] * 4
        assert progress.get("a", IDS[0] + "00") is None and progress.get("b", IDS[0]) is None
        go_on.set()
        return progress, await work

    progress, (done, skipped) = asyncio.run(register())
    assert done == [IDS[0], IDS[2]] and skipped == [{"id": IDS[1], "reason": "too long"}]
    failed = {"state": "failed", "reason": "too long"}
    assert [progress.get("a", name) for name in (*IDS, DIGESTS[1])] == [None, failed, None, failed]
    for tenant in ("b", None):
        assert progress.get(tenant, IDS[1]) is None and not progress.forget(tenant, IDS[1])
    assert progress.forget("a", IDS[1]) and not progress.forget("a", IDS[1])
    assert progress.get("a", IDS[1]) is None


def test_registering_again_replaces_a_failure():
    progress = Registrations()
    progress.begin(None, SIZED[:1])
    progress.end(None, *SIZED[0], "no room")
    progress.begin(None, SIZED[:1])
    progress.begin(None, SIZED[:1])
    progress.end(None, *SIZED[0], None)
    assert progress.get(None, IDS[0]) == WAITING
    progress.end(None, *SIZED[0], None)
    assert progress.get(None, IDS[0]) is None


def test_only_the_latest_failures_are_remembered():
    progress = Registrations(capacity=2)
    for chunk in SIZED:
        progress.begin("a", [chunk])
        progress.end("a", *chunk, "x" * 10_000)
    remembered = [progress.get("a", name) for name in IDS]
    assert remembered == [None, *[{"state": "failed", "reason": "x" * MAX_REASON}] * 2]


def test_an_internal_error_fails_its_chunk_alone():
    async def register():
        async def run(tokens):
            if list(tokens) == [3]:
                raise RuntimeError("ours")

        progress = Registrations()
        progress.begin(None, SIZED)
        with pytest.raises(RuntimeError, match="ours"):
            await compute(CHUNKS, run, progress, None, Turns(2))
        return [progress.get(None, name) for name in IDS]

    first, second, third = asyncio.run(register())
    assert first is None and third is None and second["state"] == "failed"


# Room and turns


def test_a_tenant_may_wait_with_no_more_than_there_is_room_for_others():
    progress = Registrations(backlog=8 * (PER_CHUNK + 1))

    def begin(tenant, count, first=0):
        progress.begin(tenant, [(f"{first + i:064x}", PER_CHUNK + 1) for i in range(count)])

    with pytest.raises(ValueError, match="send fewer at a time"):
        begin("a", 5)
    begin("a", 4)
    with pytest.raises(Busy, match="try again later"):
        begin("a", 1, first=4)
    assert progress.get("a", f"{4:064x}") is None
    begin("b", 2)
    with pytest.raises(Busy):
        begin("b", 1, first=4)
    begin("c", 1)
    for i in range(4):
        progress.end("a", f"{i:064x}", PER_CHUNK + 1, None)
    begin("b", 1, first=4)
    assert progress._sizes.keys() == {"b", "c"}


def started(at_once, asked):
    """The tenants whose chunks are computed, in that order.  asked: tenants in the order of their registrations."""

    async def register():
        order, turns, progress = [], Turns(at_once), Registrations()

        async def run(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

        works = []
        for tenant in asked:
            progress.begin(tenant, SIZED)
            works.append(compute(CHUNKS, lambda _tokens, tenant=tenant: run(tenant), progress, tenant, turns))
        await asyncio.gather(*works)
        return order

    return asyncio.run(register())


def test_tenants_take_turns_however_much_one_of_them_registers():
    assert started(1, "aaab") == [*"aabab", *"ab", *"aaaaa"]


def test_a_server_computes_so_many_at_a_time():
    """Whoever they are for, and however many registrations there are."""

    async def register():
        running, most, turns, progress = 0, 0, Turns(2), Registrations()

        async def run(_tokens):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

        works = []
        for tenant in (*"aabc", None):
            progress.begin(tenant, SIZED)
            works.append(compute(CHUNKS, run, progress, tenant, turns))
        await asyncio.gather(*works)
        return most

    assert asyncio.run(register()) == 2


def test_a_turn_that_is_given_up_passes_on():
    async def take():
        turns, entered = Turns(1), []

        async def work(name):
            async with turns.turn(name):
                entered.append(name)
                await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(work(name)) for name in "abcd"]
        await asyncio.sleep(0)
        tasks[1].cancel()  # while it waits
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        tasks[2].cancel()  # when its turn has come, or just before
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.turn("e"):
            return entered

    entered = asyncio.run(asyncio.wait_for(take(), 60))
    assert entered[0] == "a" and entered[-1] == "d" and "b" not in entered

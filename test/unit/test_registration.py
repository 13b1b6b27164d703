"""Registrations: a tenant can ask later what became of each of its chunks, and memory stays bounded."""

import asyncio

import pytest

from sglang_lazy.core.keys import chunk_id, tokens_digest
from sglang_lazy.serving.registration import MAX_REASON, Registrations, compute

CHUNKS = [[1, 2], [3], [4]]
DIGESTS = [tokens_digest(tokens).hex() for tokens in CHUNKS]
IDS = [chunk_id(tokens_digest(tokens)) for tokens in CHUNKS]
WAITING = {"state": "waiting"}


def test_a_registration_waits_then_succeeds_or_fails():
    async def register():
        progress, go_on = Registrations(), asyncio.Event()

        async def run(tokens):
            await go_on.wait()
            if tokens == [3]:
                raise ValueError("too long")

        work = asyncio.ensure_future(compute(CHUNKS, run, progress, "a"))
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
    progress.begin(None, DIGESTS[0])
    progress.end(None, DIGESTS[0], "no room")
    progress.begin(None, DIGESTS[0])
    progress.begin(None, DIGESTS[0])
    progress.end(None, DIGESTS[0], None)
    assert progress.get(None, IDS[0]) == WAITING
    progress.end(None, DIGESTS[0], None)
    assert progress.get(None, IDS[0]) is None


def test_only_the_latest_failures_are_remembered():
    progress = Registrations(capacity=2)
    for digest in DIGESTS:
        progress.begin("a", digest)
        progress.end("a", digest, "x" * 10_000)
    remembered = [progress.get("a", name) for name in IDS]
    assert remembered == [None, *[{"state": "failed", "reason": "x" * MAX_REASON}] * 2]


def test_an_internal_error_fails_its_chunk_alone():
    async def register():
        async def run(tokens):
            if tokens == [3]:
                raise RuntimeError("ours")

        progress = Registrations()
        with pytest.raises(RuntimeError, match="ours"):
            await compute(CHUNKS, run, progress, None)
        return [progress.get(None, name) for name in IDS]

    first, second, third = asyncio.run(register())
    assert first is None and third is None and second["state"] == "failed"

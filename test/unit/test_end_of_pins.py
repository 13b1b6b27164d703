"""Pin expiry in the HTTP process: pins end on time whatever is pinned meanwhile, and ranks' answers merge into one."""

import asyncio
import functools
import time

import pytest

from sglang_lazy.core.labels import Label
from sglang_lazy.serving.chunk_lists import merged_deletion
from sglang_lazy.serving.labels import Labels, names_of
from sglang_lazy.serving.pins import Pins

ONE = "1" * 16


class Scheduler:
    """Answers as one rank would.  ends: the times at which pins end."""

    def __init__(self):
        self.ends = []
        self.before_answer = self.names = None

    async def ask(self, verb, *, ttl=None, names=None, **_arguments):
        self.names = names
        now = time.time()
        if verb == "pin":
            self.ends.append(now + ttl)
        else:
            self.ends = [end for end in self.ends if end > now]
        answer = {"affected": [], "skipped": [], "next": min(self.ends) - now if self.ends else None}
        if verb == "expire" and self.before_answer is not None:
            await self.before_answer()
        return [answer]


@pytest.fixture
def scheduler():
    return Scheduler()


async def pin(pins, ttl):
    await pins.set(None, [ONE], True, ttl)


async def all_end(scheduler):
    async def wait():
        while scheduler.ends:
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), timeout=60)


def test_the_scheduler_learns_the_names_of_what_is_pinned(scheduler):
    async def run():
        labels = Labels()
        labels.add("a", {ONE: Label("Lease")})
        pins = Pins(scheduler.ask, functools.partial(names_of, labels))
        seen = []
        for tenant, name in (("a", ONE), ("a", ONE + "f" * 48), ("b", ONE), ("a", "2" * 16)):
            await pins.set(tenant, [name], True, 0.01)
            seen.append(scheduler.names)
        await all_end(scheduler)
        assert seen == [{ONE: "Lease"}, {ONE + "f" * 48: "Lease"}, {}, {}]

    asyncio.run(run())


def test_pins_end_in_any_order(scheduler):
    async def run():
        pins = Pins(scheduler.ask)
        for ttl in (0.05, 0.01, 0.03):
            await pin(pins, ttl)
        await all_end(scheduler)
        await pin(pins, 0.01)
        await all_end(scheduler)

    asyncio.run(run())


def test_a_shorter_pin_ends_first(scheduler):
    async def run():
        pins = Pins(scheduler.ask)
        await pin(pins, 3600)
        await pin(pins, 0.01)
        while len(scheduler.ends) == 2:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_a_pin_set_while_the_last_one_ends_also_ends(scheduler):
    async def run():
        pins, pinned = Pins(scheduler.ask), asyncio.Event()

        async def pin_late():
            if not pinned.is_set() and not scheduler.ends:
                await pin(pins, 0.01)
                pinned.set()

        scheduler.before_answer = pin_late
        await pin(pins, 0.01)
        await pinned.wait()
        await all_end(scheduler)

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def test_pins_on_several_ranks():
    """A chunk is pinned if it is on any rank. Of the reasons of those where it is not, one that says more is told."""
    unknown, full = "unknown", "the budget of pins is used up"

    async def ask(verb, **_arguments):
        skipped = ([("b", unknown), ("c", unknown), ("d", full)], [("a", unknown), ("c", full), ("d", unknown)])
        return [
            {"affected": [{"id": one}], "skipped": [{"id": name, "reason": why} for name, why in others], "next": None}
            for one, others in zip("ab", skipped, strict=True)
        ]

    assert asyncio.run(Pins(ask).set(None, [*"abcd"], True, None)) == {
        "requested": 4,
        "affected": [{"id": "a"}, {"id": "b"}],
        "skipped": [{"id": "c", "reason": full}, {"id": "d", "reason": full}],
    }


def test_deletion_on_several_ranks():
    first = {"affected": [{"id": "a", "state": "deleted"}], "skipped": [{"id": "b", "reason": "unknown"}]}
    second = {"affected": [{"id": "a", "state": "in use"}], "skipped": [{"id": "b", "reason": "unknown"}]}
    assert merged_deletion(["a", "b"], [first, second], lambda name: False) == {
        "requested": 2,
        "affected": [{"id": "a", "state": "in use"}],
        "skipped": [{"id": "b", "reason": "unknown"}],
    }
    forgotten = []
    answer = merged_deletion(["b"], [{**first, "affected": []}], lambda name: forgotten.append(name) or True)
    assert forgotten == ["b"] and answer["affected"] == [{"id": "b", "state": "deleted"}]


def test_an_ambiguous_id_is_reported():
    skipped = [{"id": "a", "reason": "ambiguous: give more digits of the digest"}]
    answer = merged_deletion(["a"], [{"affected": [], "skipped": skipped}], pytest.fail)
    assert answer["skipped"] == skipped and answer["affected"] == []

"""Surveys count chunks in steps: they agree with lists whatever happens in between, and cost the scheduler little."""

import asyncio
import contextlib
import random

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from test_chunk_lists import deleted, id_of, listed, scan_of_ranks
from test_pins import pin

from fakes.loop import QUESTION, A, B, C, D, Loop
from sglang_lazy.chunks import catalog, reports
from sglang_lazy.scheduler import control
from sglang_lazy.serving import surveys
from sglang_lazy.serving.surveys import Surveys, merged

pytestmark = pytest.mark.usefixtures("sglang_context")
LISTS = {"hottest": ("hits", lambda chunk: chunk["hits"]), "largest": ("tokens", lambda _: True)}
LISTS["pinned"] = ("tokens", lambda chunk: chunk["pinned"])


def surveyed(*loops, between=lambda: None, tenant=None, everybody=False):
    """A complete survey.  between: called between two messages."""
    return merged(scan_of_ranks(loops, "survey", between, tenant=tenant, everybody=everybody))


def scanning(monkeypatch, size):
    monkeypatch.setattr(reports, "AT_ONCE", size)
    monkeypatch.setattr(control, "AT_ONCE", size)
    monkeypatch.setattr(catalog, "_SHARE", 1)


def share(chunks):
    return {"chunks": len(chunks), "tokens": sum(chunk["tokens"] for chunk in chunks)}


def check(found, chunks):
    """Compare a survey with the list of the same chunks."""
    resident = [chunk for chunk in chunks if chunk["state"] == "resident"]
    expected = {
        "resident": share(resident),
        "pinned": share([chunk for chunk in resident if chunk["pinned"]]),
        "locked": share([chunk for chunk in resident if chunk["users"]]),
        "evictable": share([chunk for chunk in resident if not chunk["users"] and not chunk["pinned"]]),
        "host": share([chunk for chunk in chunks if chunk["state"] == "host"]),
    }
    assert {name: found["chunks"][name] for name in expected} == expected
    assert found["chunks"]["pending"] == sum(chunk["state"] == "pending" for chunk in chunks)
    for name, (field, wanted) in LISTS.items():
        known = {chunk["id"]: chunk for chunk in chunks if chunk["tiers"] and wanted(chunk)}
        best = sorted((chunk[field] for chunk in known.values() if chunk[field]), reverse=True)[: reports.TOP]
        assert [chunk[field] for chunk in found[name]] == best
        assert all(known[chunk["id"]][field] == chunk[field] for chunk in found[name])
        assert len({chunk["id"] for chunk in found[name]}) == len(best)


@pytest.mark.parametrize("size", [1, 7, 30, 500])
@pytest.mark.parametrize("host_size", [0, 150])
def test_surveys_agree_with_lists(monkeypatch, size, host_size):
    scanning(monkeypatch, size)
    rng = random.Random(size)
    loop = Loop(pool_size=120, host_size=host_size)
    chunks = [(True, (rng.randrange(1, 15), i % 15 + 1, i // 15 + 1, *[3] * rng.randrange(4))) for i in range(30)]
    loop.warm(*chunks)
    for i in range(40):
        loop.submit([rng.choice(chunks[-12:]), QUESTION], f"again-{i}", max_new_tokens=1)
    loop.run()
    pin(loop, *chunks[-3:])
    loop.submit([*chunks[-4:-2], QUESTION], "running", max_new_tokens=3)
    loop.step()
    everything = listed(loop, limit=1000)["chunks"]
    assert {chunk["state"] for chunk in everything} == {"resident", "host"} - ({"host"} if not host_size else set())
    assert any(chunk["users"] and chunk["pinned"] for chunk in everything)
    found = surveyed(loop)
    check(found, everything)
    evicted = loop.store.counts.num_evicted_chunks
    assert sum(chunks for _, chunks, _ in found["evicted"]) == evicted > 0
    device = found["memory"]["device"]
    assert device == {"size": 120, "free": loop.pools.slots.available_size()}
    assert (found["memory"]["host"] is None) == (not host_size)
    if host_size:
        assert found["memory"]["host"]["free"] == loop.tree_cache.token_to_kv_pool_host.available_size()


def test_chunks_being_computed_are_counted():
    loop = Loop(chunked_prefill_size=4)
    loop.submit([A, B, QUESTION], "running", max_new_tokens=3)
    loop.step()
    check(surveyed(loop), listed(loop)["chunks"])
    assert surveyed(loop)["chunks"]["pending"] == 1
    assert surveyed(loop, tenant="other")["chunks"]["pending"] == 0


def test_chunks_that_come_and_go_during_a_scan(monkeypatch):
    """Each chunk is counted once, in its state when its turn comes; chunks gone by then are left out."""
    scanning(monkeypatch, 2)
    loop = Loop()
    loop.warm(A, B, C)
    found = surveyed(loop, between=lambda: deleted(loop, id_of(A), id_of(C)))
    assert found["chunks"]["resident"] == {"chunks": 2, "tokens": 8}
    assert {chunk["id"] for chunk in found["largest"]} == {id_of(A), id_of(B)}
    loop.warm(C, D)
    found = surveyed(loop, between=lambda: loop.warm(A))
    assert {chunk["id"] for chunk in found["largest"]} == {id_of(chunk) for chunk in (A, B, C, D)}
    check(surveyed(loop), listed(loop)["chunks"])


def test_a_flush_during_a_scan(monkeypatch):
    scanning(monkeypatch, 2)
    loop = Loop()
    loop.warm(A, B, C)
    assert surveyed(loop, between=loop.pools.flush)["chunks"]["resident"]["chunks"] == 2
    check(surveyed(loop), [])


def test_ranks_finish_independently(monkeypatch):
    scanning(monkeypatch, 1)
    loops = [Loop(), Loop(), Loop()]
    loops[0].warm(A)
    loops[1].warm(A, B, C)
    found = surveyed(*loops)
    assert found["chunks"]["resident"] == {"chunks": 4, "tokens": 16}
    assert [chunk["dp_rank"] for chunk in found["largest"]] == [0, 1, 1, 1]


def test_a_tenants_survey_counts_its_own_chunks():
    loop = Loop()
    for i, tenant in enumerate([None, "a", "b"]):
        chunks = [A, B, C][: i + 1]
        loop.submit([*chunks, QUESTION], f"t{i}", cache_salt=tenant)
    loop.run()
    for tenant in (None, "a", "b", "c"):
        check(surveyed(loop, tenant=tenant), listed(loop, tenant)["chunks"])
    found = surveyed(loop, everybody=True)
    assert found["chunks"]["resident"] == {"chunks": 6, "tokens": 24}
    assert {chunk["cache_salt"] for chunk in found["largest"]} == {None, "a", "b"}


def test_a_tenants_survey_counts_its_own_evictions():
    """Not those of others, from which it could read the lengths of their chunks."""
    loop = Loop(pool_size=40)
    for i, tenant in enumerate(["a", "b"]):
        loop.submit([*[A, B][: i + 1], QUESTION], f"t{i}", cache_salt=tenant)
    loop.run()
    loop.tree_cache.evict(EvictParams(num_tokens=40))

    def evicted(**whose):
        return [row[1:] for row in surveyed(loop, **whose)["evicted"]]

    assert evicted(tenant="a") == [[1, 4]] and evicted(tenant="b") == [[2, 8]]
    assert evicted(tenant=None) == [] and evicted(everybody=True) == [[3, 12]]


def test_a_tenants_survey_does_not_tell_what_is_free():
    """All tenants together leave that: its changes are the lengths of what another computes, and loses."""
    loop = Loop(pool_size=40, host_size=80)
    loop.warm(A, B)
    for whose in ({"tenant": "a"}, {"tenant": "b"}):
        assert surveyed(loop, **whose)["memory"] == {
            "device": {"size": 40, "free": None},
            "host": {"size": 80, "free": None},
        }
    free = {tier: numbers["free"] for tier, numbers in surveyed(loop, everybody=True)["memory"].items()}
    assert free == {tier: numbers["free"] for tier, numbers in surveyed(loop, tenant=None)["memory"].items()}
    assert 0 < free["device"] < 40 and 0 < free["host"] < 80


def test_surveys_of_several_processes_do_not_disturb_one_another(monkeypatch):
    """Tokenizer workers do not coordinate their surveys."""
    scanning(monkeypatch, 1)
    loop = Loop()
    loop.warm(A, B, C)
    check(surveyed(loop, between=lambda: check(surveyed(loop), listed(loop)["chunks"])), listed(loop)["chunks"])


def test_expired_pins_are_not_counted():
    loop = Loop()
    loop.warm(A)
    pin(loop, A, ttl=5.0)
    handle = loop.admission.control.handle
    assert surveyed(loop)["chunks"]["pinned"]["chunks"] == 1
    handle("expire", {}, 1e9)
    assert surveyed(loop)["chunks"]["pinned"]["chunks"] == 0


# The HTTP process


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is the time slept."""

    def __init__(self):
        super().__init__()
        self.now, select = 0.0, self._selector.select

        def jump(timeout):
            self.now += timeout or 0.0
            return select(0)

        self._selector.select = jump

    def time(self):
        return self.now


def run(coroutine):
    with contextlib.closing(Clock()) as loop:
        return loop.run_until_complete(coroutine)


def answer(num_chunks, sizes=()):
    empty = {"chunks": 0, "tokens": 0}
    counted = {"chunks": num_chunks, "tokens": 4 * num_chunks}
    chunks = {"resident": counted, "pinned": empty, "host": empty, "pending": 1, "fetching": 0}
    described = [{"id": f"{size:x}" * 16, "tokens": size, "hits": size} for size in sizes]
    memory = {"device": {"size": 100, "free": 10}, "host": None}
    return {
        "chunks": chunks,
        "hottest": described,
        "largest": described,
        "pinned": [],
        "memory": memory,
        "evicted": [[20, num_chunks, 1]],
    }


class Asked:
    """Records what a scheduler of `num_chunks` chunks is asked, with times.  messages: of each survey."""

    def __init__(self, num_chunks=3, messages=1):
        self.num_chunks, self.messages, self.begun, self.left = num_chunks, messages, [], 0

    async def __call__(self, starts):
        await asyncio.sleep(0)
        if starts is None:
            assert not self.left, "two surveys at once"
            self.begun.append(asyncio.get_running_loop().time())
            self.left = self.messages
        else:
            assert starts == {0: 7}
        self.left -= 1
        return [{**answer(self.num_chunks if not self.left else 0), "next": 7 if self.left else None}]


def test_concurrent_callers_share_one_survey():
    async def look():
        kept, asked = Surveys(), Asked(messages=5)
        found = await asyncio.gather(*(kept.get("a", asked) for _ in range(9)))
        assert asked.begun == [0.0] and [one["chunks"]["resident"]["chunks"] for one in found] == [3] * 9

    run(look())


@pytest.mark.parametrize("num_chunks", [3, 50_000])
@pytest.mark.parametrize("num_tenants", [1, 4])
def test_surveys_take_a_hundredth_of_the_schedulers_time(num_chunks, num_tenants):
    """However many callers, at a microsecond per chunk. The same survey is not made twice within a second."""

    async def look():
        kept, asked, clock = Surveys(), Asked(num_chunks, messages=3), asyncio.get_running_loop()

        async def watch(whose):
            while clock.time() < 100:
                await kept.get(whose, asked)
                await asyncio.sleep(0.3)

        await asyncio.gather(*(watch(i % num_tenants) for i in range(12)))
        seconds = asked.begun[-1] - asked.begun[0]
        assert num_chunks * 1e-6 * (len(asked.begun) - 1) <= 0.01 * seconds + 1e-9
        assert 10 < len(asked.begun) <= num_tenants * (seconds + 1)

    run(look())


def test_failed_and_abandoned_surveys_block_nobody():
    async def look():
        kept, asked = Surveys(), Asked()

        async def fails(_starts):
            raise ValueError("no chunks")

        with pytest.raises(ValueError, match="no chunks"):
            await kept.get("a", fails)
        left = asyncio.ensure_future(kept.get("a", Asked(messages=9)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert await kept.get("a", asked) == answer(3)

    run(look())


def test_the_number_of_cached_surveys_is_bounded(monkeypatch):
    monkeypatch.setattr(surveys, "_KEPT", 2)

    async def look():
        kept = Surveys()
        for whose in "abcd":
            await kept.get(whose, Asked())
        assert list(kept._kept) == ["c", "d"]

    run(look())


def test_surveys_of_ranks_are_summed():
    found = merged([(0, answer(1, [5, 1])), (1, answer(2, [7, 3]))])
    assert found["chunks"]["resident"] == {"chunks": 3, "tokens": 12} and found["chunks"]["pending"] == 2
    assert [(chunk["tokens"], chunk["dp_rank"]) for chunk in found["largest"]] == [(7, 1), (5, 0), (3, 1), (1, 0)]
    assert found["memory"] == {"device": {"size": 200, "free": 20}, "host": None}
    many = merged([(0, answer(9, range(1, 9))), (0, answer(9, range(9, 16)))])
    assert [chunk["hits"] for chunk in many["hottest"]] == list(range(15, 5, -1))


def test_an_eviction_during_a_scan(monkeypatch):
    """Chunks that moved to the host are counted in the state they are found in."""
    scanning(monkeypatch, 1)
    loop = Loop(pool_size=40, host_size=80)
    loop.warm(A, B)
    found = surveyed(loop, between=lambda: loop.tree_cache.evict(EvictParams(num_tokens=40)))
    assert (found["chunks"]["resident"]["chunks"], found["chunks"]["host"]["chunks"]) == (1, 1)

"""The garbage collector: requests are freed without it, and long-lived chunks are scanned only once."""

import gc
import weakref

import pytest

from fakes.loop import QUESTION, A, B, C, Loop
from sglang_lazy.port.scheduler import upkeep

pytestmark = pytest.mark.usefixtures("sglang_context")


@pytest.fixture
def by_hand():
    """Collection happens only when called for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()  # what is frozen stays so, as are all modules: visiting them takes seconds


@pytest.mark.parametrize("link", ["block", "base", "copy", "epic:tokens=1", "query:ratio=0.5", "blend:ratio=0.5"])
def test_finished_requests_leave_no_cycles(by_hand, link):
    loop = Loop()
    for i in range(2):  # first its chunks are computed, then found
        req = weakref.ref(loop.submit([A, B, QUESTION], f"r{i}", link=link, max_new_tokens=2))
        loop.run()
        loop.submit([C, QUESTION], f"another-{i}")  # SGLang holds on to the last batch
        loop.run()
        assert req() is None


def in_sight(loop):
    """How many of its chunks the collector would scan."""
    return len({id(chunk) for chunk in loop.store.catalog} & {id(one) for one in gc.get_objects()})


def test_an_idle_scheduler_freezes_its_chunks(by_hand):
    loop = Loop()
    loop.warm(A, B, C)
    slots = [weakref.ref(chunk.node.slots) for chunk in loop.store.catalog]
    for _ in range(upkeep.COLLECTIONS):
        upkeep.collect(loop)
        assert in_sight(loop) == 3
        gc.collect(1)
    loop.submit([A, QUESTION], "r")
    upkeep.collect(loop)
    assert in_sight(loop) == 3
    loop.run()
    upkeep.collect(loop)
    assert in_sight(loop) == 0
    loop.pools.flush()
    assert [kept() for kept in slots[1:]] == [None] * 2  # SGLang's last batch still refers to the first


def test_a_scheduler_without_chunks_is_left_alone(by_hand):
    loop = Loop()
    loop.warm(A)
    gc.collect(1)
    gc.collect(1)
    loop.tree_cache.admission = None
    upkeep.collect(loop)
    assert in_sight(loop) == 1

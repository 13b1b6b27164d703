"""What processes remember of clients' requests: it takes no more memory than it says, however it is sent."""

import concurrent.futures
import gc
import random
import sys
import tracemalloc
from array import array

import pytest

from sglang_lazy.core.remembered import Remembered
from sglang_lazy.scheduler.choices import Choices
from sglang_lazy.serving.known_chunks import KnownChunks
from sglang_lazy.serving.tokenization import RecentTokens

CAPACITY = 1 << 20


def test_the_least_recently_used_are_forgotten():
    values = Remembered[str, int](30 + 3 * 200, size=lambda key, value: value)
    for value, key in enumerate("abc", 9):
        values.put(key, value)
    assert values.get("a") == 9 and values.num_bytes == 630
    values.put("d", 1)
    assert [values.get(key) for key in "abcd"] == [9, None, 11, 1] and len(values) == 3
    values.put("a", 2)
    assert values.num_bytes == 614 and values.pop("a") == 2 and values.pop("a") is None
    values.put("c", 10_000)
    assert values.get("c") is None and values.get("d") == 1, "a value that is too large takes nobody's place"
    values.clear()
    assert not len(values) and not values.num_bytes and values.get("d") is None


def test_threads_share_them():
    values = Remembered[int, int](4 * 200, size=lambda key, value: 0)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def use(seed):
        dice = random.Random(seed)
        for _ in range(20_000):
            key = dice.randrange(8)
            if values.get(key) is None:
                values.put(key, key)

    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(use, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert values.num_bytes == 200 * len(values) <= 800


def recent_tokens(dice):
    recent = RecentTokens(CAPACITY)

    def add(tenant, length):
        text = "".join(map(chr, dice.choices(dice.choice((range(0x61, 0x7A), range(0x4E00, 0x9000))), k=length + 7)))
        recent.add(tenant, text, dice.choices(range(100_000), k=max(1, length // 4)))

    return recent._tokens, add


def known_chunks(dice):
    known = KnownChunks(CAPACITY)
    return known._chunks, lambda tenant, length: known.add(tenant, dice.choices(range(100_000), k=length))


def choices(dice):
    remembered = Choices(CAPACITY)

    def add(tenant, length):
        ids = array("q", dice.choices(range(100_000), k=20))
        kept = [[(2 * i, 2 * i + 1) for i in range(length)], [], [(0, 3)]]
        remembered.remember(("query", tenant, None, tenant), ids, ((0, 4), (5, 7), (7, 9)), kept)

    return remembered._choices, add


@pytest.mark.parametrize("made", [recent_tokens, known_chunks, choices])
@pytest.mark.parametrize("length", [1, 3, 300])
@pytest.mark.parametrize("tenant", [0, 200])
def test_containers_hold_no_more_bytes_than_they_say(made, length, tenant):
    """Short entries of many tenants above all, whose keys take more memory than their tokens."""
    dice = random.Random(0)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        values, add = made(dice)
        number = 0
        while number < 2 * len(values) + 10:  # until as many have been forgotten as are left
            add("".join(dice.choices("abcdefgh", k=tenant)) or None, length)
            number += 1
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert CAPACITY / 2 < values.num_bytes <= CAPACITY
    assert 0.6 * values.num_bytes < held < 1.1 * values.num_bytes, f"{held} bytes, not {values.num_bytes}"

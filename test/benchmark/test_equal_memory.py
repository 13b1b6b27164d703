"""Hit rates at equal memory against a few lines that keep the least recently used chunks."""

import random
from array import array
from collections import OrderedDict

import pytest

from benchmark.eviction.caches import WithStates
from benchmark.eviction.hybrids import layout_of
from benchmark.eviction.workload import Request
from benchmark.serving.models import QWEN3_6_35B_A3B


@pytest.mark.parametrize("num_states, num_slots", [(7, 10_000), (1000, 700), (9, 800)])
def test_chunks_with_states_are_evicted_as_the_oldest_of_what_fits(num_states, num_slots):
    """Chunks that begin alike share slots in the tree: here they do not."""
    rng = random.Random(f"{num_states} {num_slots}")
    chunks = [array("q", [number, *range(1000, 1099)]) for number in range(20)]
    cache, kept = WithStates(num_slots, num_states), OrderedDict()
    fits = min(num_states, num_slots // 100)
    for _ in range(300):
        drawn = rng.sample(range(20), 3)
        found = [number for number in drawn if number in kept]
        for number in drawn:
            kept[number] = None
        for number in [*found, *(number for number in drawn if number not in found)]:
            kept.move_to_end(number)
        while len(kept) > fits:
            kept.popitem(last=False)
        assert cache.serve(Request([chunks[number] for number in drawn], True)) == 100 * len(found)
        cache.check()


def test_a_state_is_as_large_as_served():
    """As a server's log says it of this shape."""
    assert round(layout_of(QWEN3_6_35B_A3B).slot_bytes / 1e6) == 127

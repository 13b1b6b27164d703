"""Free slots of host memory: none twice, none lost, and runs where possible."""

import random

import numpy as np
import pytest
import torch

from sglang_lazy.cache.host_slots import HostSlots, runs


def test_slots_are_given_out_once_and_come_back():
    dice, slots, held = random.Random(3), HostSlots(200), []
    for _ in range(2000):
        if dice.random() < 0.55:
            count = dice.randrange(0, 30)
            free = 200 - sum(map(len, held))
            taken = slots.alloc(count)
            assert (taken is None) == (count > free)
            if taken is not None:
                held.append(taken.tolist())
        elif held:
            given = held.pop(dice.randrange(len(held)))
            cut = dice.randrange(len(given) + 1)
            held.append(given[cut:])
            slots.free(torch.tensor(dice.sample(given[:cut], cut), dtype=torch.int64))
        in_use = [slot for some in held for slot in some]
        assert len(set(in_use)) == len(in_use) and all(0 <= slot < 200 for slot in in_use)
        assert slots.num_free == 200 - len(in_use)
    slots.clear()
    assert slots.alloc(200).tolist() == list(range(200))


def test_freed_neighbours_are_one_extent_again():
    slots = HostSlots(30)
    first, second, third = (slots.alloc(10) for _ in range(3))
    for part in (first[::2], third, second, first[1::2]):
        slots.free(part)
    assert slots.alloc(30).tolist() == list(range(30))


def test_the_smallest_extent_that_suffices_is_taken():
    slots = HostSlots(100)
    taken = slots.alloc(100)
    for start, end in ((0, 9), (20, 25), (40, 60)):
        slots.free(taken[start:end])
    assert slots.alloc(5).tolist() == list(range(20, 25))
    assert slots.alloc(8).tolist() == list(range(8))
    assert slots.alloc(21).tolist() == [*range(40, 60), 8], "the largest first"
    assert slots.num_free == 0 and slots.alloc(1) is None and slots.alloc(0).tolist() == []


@pytest.mark.parametrize("wrong", [[3, 4], [0, 5], [9, 10], [2, 2]])
def test_free_slots_cannot_be_freed(wrong):
    slots = HostSlots(10)
    slots.alloc(4)
    with pytest.raises(ValueError, match="in use"):
        slots.free(torch.tensor(wrong))
    assert slots.num_free == 6


@pytest.mark.parametrize("wrong", [-1, 10])
def test_slots_that_do_not_exist_cannot_be_freed(wrong):
    slots = HostSlots(10)
    slots.alloc(10)
    with pytest.raises(ValueError, match="in use"):
        slots.free(torch.tensor([4, wrong]))
    assert slots.num_free == 0 and slots.alloc(1) is None


def test_runs_count_up_in_all_lists():
    one, other = np.array([4, 5, 6, 7, 9, 10, 3]), np.array([0, 1, 5, 6, 7, 8, 9])
    starts, lengths = runs(one, other)
    assert starts.tolist() == [0, 2, 4, 6] and lengths.tolist() == [2, 2, 2, 1]
    assert [each.tolist() for each in runs(one[:1])] == [[0], [1]]
    assert [each.tolist() for each in runs(one[:0], other[:0])] == [[], []]

"""The picker of workers, in front of simulated workers whose caches are known."""

import copy
import math
import random
from collections import OrderedDict

import pytest

from sglang_lazy.serving.picker import SLACK, Picker


class Cache:
    """A worker's cache: the `size` chunks used last."""

    def __init__(self, size: int):
        self.size, self.chunks = size, OrderedDict()

    def serve(self, chunks) -> dict:
        hits = {chunk: chunk in self.chunks for chunk in chunks}
        for chunk in chunks:
            self.chunks[chunk] = None
            self.chunks.move_to_end(chunk)
        while len(self.chunks) > self.size:
            self.chunks.popitem(last=False)
        return hits


def believed(picker: Picker, chunk, worker) -> bool:
    """Whether the picker prefers this worker for this chunk to an idle one of unknown cache."""
    return copy.deepcopy(picker).pick({chunk: 1}, {worker: 1, "a new one": 0}).worker == worker


def send(picker: Picker, chunks, worker) -> None:
    picker.pick(dict.fromkeys(chunks, 1), {worker: 0}).answered({})


def test_chunks_count_by_size():
    picker = Picker()
    send(picker, "ab", "two small")
    send(picker, "c", "one large")
    loads = {"two small": 0, "one large": 0, "none": 0}
    assert picker.pick({"a": 10, "b": 10, "c": 21}, loads).worker == "one large"
    assert picker.pick({"a": 10, "b": 10, "d": 90}, loads).worker == "two small"


def test_ties_go_to_the_least_loaded_then_the_emptiest():
    picker = Picker()
    send(picker, "ab", 0)
    send(picker, "c", 1)
    assert picker.pick({"new": 1}, {0: 0, 1: 1}).worker == 0
    assert picker.pick({"newer": 1}, {0: 0, 1: 0}).worker == 1


def test_simultaneous_prompts_go_to_one_worker():
    """The second one follows the first, which has no answer yet."""
    picker = Picker()
    loads = dict.fromkeys(range(4), 0)
    first = picker.pick({"new": 1}, loads).worker
    loads[first] += 1
    assert picker.pick({"new": 1}, loads).worker == first


@pytest.mark.parametrize("imbalance", [1, 1.25, 3])
def test_no_worker_gets_more_than_its_share(imbalance):
    rng = random.Random(0)
    picker = Picker(imbalance)
    loads = dict.fromkeys(range(5), 0)
    running, left = [], []
    for _ in range(500):
        if len(running) > rng.randrange(60):
            loads[running.pop(rng.randrange(len(running)))] -= 1
        worker = picker.pick({"everybody's": 1}, loads).worker
        loads[worker] += 1
        running.append(worker)
        left.append(imbalance * len(running) / 5 + SLACK - loads[worker])
    assert 0 <= min(left) < 1  # the limit holds, and is used


def test_the_picker_learns_cache_sizes_from_answers():
    """From answers alone the picker learns how large the caches are."""
    rng = random.Random(1)
    picker = Picker()
    caches = {0: Cache(20), 1: Cache(60)}
    wrong = []
    for step in range(600):
        chunks = dict.fromkeys((min(int(rng.expovariate(0.02)), 399) for _ in range(4)), 1)
        pick = picker.pick(chunks, dict.fromkeys(caches, 0))
        pick.answered(caches[pick.worker].serve(chunks))
        if step % 150 == 149:
            for worker, cache in caches.items():
                assert all(believed(picker, chunk, worker) for chunk in cache.chunks)
                wrong.append(sum(believed(picker, chunk, worker) for chunk in range(400)) - len(cache.chunks))
    assert max(wrong) < 60, wrong  # without answers, up to 340


def test_one_answer_reveals_a_restarted_worker():
    picker, loads = Picker(), {0: 0}
    for chunk in range(10):
        send(picker, [chunk], 0)
    picker.pick({9: 1}, loads).answered({9: False})
    assert [chunk for chunk in range(10) if believed(picker, chunk, 0)] == [9]


def test_a_miss_of_a_chunk_under_way_says_nothing():
    picker, loads = Picker(), {0: 0}
    send(picker, ["old"], 0)
    first, second = (picker.pick({"new": 1}, loads) for _ in range(2))
    first.answered({"new": False})
    second.answered({"new": False})
    assert believed(picker, "old", 0)


def test_the_memory_of_chunks_is_bounded():
    picker = Picker(capacity=3)
    send(picker, "abc", 0)
    send(picker, "ad", 0)
    assert [chunk for chunk in "abcd" if believed(picker, chunk, 0)] == ["a", "c", "d"]


def test_a_worker_is_forgotten():
    picker = Picker()
    pick = picker.pick({"a": 1}, {0: 0})
    picker.forget(0)
    pick.answered({"a": False})
    assert not believed(picker, "a", 0)


def test_bad_values():
    for bad in ({"imbalance": 0.9}, {"imbalance": math.nan}, {"capacity": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Picker(**bad)
    with pytest.raises(LookupError):
        Picker().pick({"a": 1}, {})

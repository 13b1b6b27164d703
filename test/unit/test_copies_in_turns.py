"""Copies in turns: small batches, each after the one before and on the other stream, which together are all bytes."""

import functools
import itertools

import numpy as np
import pytest

from fakes import streams
from sgl_kernel_lazy import copy_engine
from sglang_lazy.cache import turns
from sglang_lazy.cache.turns import Turns, batches

BATCH_BYTES = 100


@pytest.fixture
def engine(monkeypatch):
    """A copy engine that notes batches as they are queued, and their numbers as they are copied."""
    queued, copied = [], []

    def copy_runs(sources, targets, sizes, stream):
        stream.do(functools.partial(copied.append, len(queued)))
        queued.append((sources, targets, sizes, stream))

    monkeypatch.setattr(copy_engine, "copy_runs", copy_runs)
    monkeypatch.setattr(turns, "BATCH_BYTES", BATCH_BYTES)
    return queued, copied


def random_runs(dice, count):
    """Runs of 1 to 299 bytes in any order on both sides, some next to each other."""
    sizes = dice.integers(1, 300, count)
    return [*(dice.permutation(count) * 300 + first for first in (1_000_000, 5_000_000)), sizes]


def bytes_of(sources, targets, sizes):
    """Where each byte goes, in order."""
    return [
        (source + i, target + i)
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True)
        for i in range(size)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_all_bytes_once(seed):
    dice = np.random.default_rng(seed)
    all_runs = random_runs(dice, 1 + seed)
    made = list(batches(*all_runs, BATCH_BYTES))
    assert [byte for batch in made for byte in bytes_of(*batch)] == bytes_of(*all_runs)
    assert all((sizes > 0).all() for *_, sizes in made)
    assert {int(sizes.sum()) for *_, sizes in made[:-1]} <= {BATCH_BYTES} and made[-1][2].sum() <= BATCH_BYTES


def test_only_what_a_batch_cannot_hold_is_cut():
    sizes = np.array([30, 70, 40, 60, 250])
    made = [sizes.tolist() for *_, sizes in batches(np.arange(5) * 300, np.arange(5) * 300, sizes, BATCH_BYTES)]
    assert made == [[30, 70], [40, 60], [100], [100], [50]]


@pytest.mark.parametrize("who", ["the stream that asked", "the one that copies last"])
def test_batches_alternate_and_follow_each_other(engine, who):
    """And what the stream that asks for them does before; across calls, too. Streams go on only if somebody waits."""
    queued, copied = engine
    dice, in_turns, asking, expected = np.random.default_rng(1), Turns(streams), streams.Stream(), []
    with streams.stream(asking):
        for call in ("first", "second", "third"):
            asking.do(functools.partial(copied.append, call))
            before = len(queued)
            in_turns.copy_runs(*random_runs(dice, 4))
            expected += [call, *range(before, len(queued))]
    *_, last = queued[-1]
    assert not copied and len(queued) > 9 and asking not in {stream for *_, stream in queued}
    assert all(one[3] is not other[3] for one, other in itertools.pairwise(queued))
    assert len({stream for *_, stream in queued}) == 2
    waited = asking if who == "the stream that asked" else last
    while waited.queued:
        waited.advance()
    assert copied == expected


def test_nothing_is_queued_for_no_runs(engine):
    Turns(streams).copy_runs(*[np.empty(0, np.int64)] * 3)
    assert not engine[0]

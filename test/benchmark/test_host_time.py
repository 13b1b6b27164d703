"""The scheduler's host time: consistent rows from every contender, warm and while evicting."""

import json

import pytest

from benchmark.scheduler.host import STEPS
from benchmark.scheduler.host_time import further_chunks, parse_args, parse_shape, regression, rows
from fakes.context import published


def test_rows(tmp_path):
    """Each row counts what happened: all chunks hit when warm, evictions when the pool is full, steps that add up to
    the total."""
    flags = ["--shapes", "3x8", "--resident", "2", "12", "--requests", "6", "--warm-up", "2", "--separator-len", "1"]
    with published():
        measured = list(rows(parse_args([*flags, "--out", str(tmp_path / "rows.jsonl")])))
    cases = [(row["contender"], row["mode"]) for row in measured]
    assert cases == [
        (name, mode)
        for mode in ("warm", "evicting")
        for name in ("lazy", "lazy-metrics", "lazy-tiers", "lazy-plain", "stock")
    ]
    for row in measured:
        assert json.loads(json.dumps(row)) == row
        computes = row["mode"] == "evicting" and row["contender"] in ("lazy", "lazy-metrics")
        assert (row["filled"] > 0) == computes
        assert row["resident"] == 12, "with two chunks resident, no request of three is all hits"
        full = row["mode"] == "evicting" or row["contender"] == "lazy-tiers"
        assert (row["evicted"] > 0) == full == (row["us_per_evicted"] is not None)
        steps, total = row["steps_us_per_chunk"], row["us_per_chunk"]
        assert list(steps) == list(STEPS)
        assert sum(step["mean"] for step in steps.values()) == pytest.approx(total["mean"], abs=0.1)
        assert 0 < total["p50"] <= total["p99"] <= total["max"]
        assert all(steps[step]["mean"] > 0 for step in ("layout", "batch", "publish", "finish"))
        assert (steps["metrics"]["mean"] > 0) == (row["contender"] == "lazy-metrics")


def test_further_chunks():
    """With 100 us per request and 10 us per chunk, the slope is found, among rows of equal parameters only."""

    def row(contender, shape, mode="warm"):
        total = 100 + 10 * parse_shape(shape)[0]
        fields = dict(contender=contender, shape=shape, mode=mode, resident=50)
        mean = 1.5 * total / parse_shape(shape)[0]
        return fields | dict(us_without_fills=total, us_per_fill=total / 2, us_per_chunk=dict(mean=mean))

    measured = [row("lazy", shape) for shape in ("1x8", "4x8", "2x8", "2x9")]
    measured += [row("stock", "1x8"), row("lazy", "4x8", "evicting")]
    assert list(further_chunks(measured)) == [
        dict(
            contender="lazy",
            chunk_len=8,
            mode="warm",
            resident=50,
            us_per_further_chunk=10,
            us_per_fill=70,
            us_on_average=15,
        )
    ]
    assert not list(further_chunks([row("lazy", "1x8"), row("lazy", "4x8") | {"us_without_fills": None}]))


def test_fills():
    """With 50 us per fill besides 200, the two are separated where the number of fills varies, and not where it is
    constant."""
    assert regression([0, 3, 1], [200, 350, 250]) == dict(filled=4, us_without_fills=200, us_per_fill=50)
    assert regression([0, 0, 0], [100, 300, 200]) == dict(filled=0, us_without_fills=200, us_per_fill=None)
    assert regression([2, 2], [300, 300]) == dict(filled=4, us_without_fills=None, us_per_fill=None)


def test_shapes():
    assert parse_shape("5x2048") == (5, 2048)
    for wrong in ("5", "0x4", "65x128", "a few"):
        with pytest.raises(ValueError):
            parse_shape(wrong)

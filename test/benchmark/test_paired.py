"""Paired differences between contenders that took turns: known answers, pooling, and what cannot be paired."""

import json

import numpy as np
import pytest

from benchmark.serving.paired import SAME, compare, paired_stages


def write_rows(folder, *rows, stage_size=4):
    """rows: (contender, phase, mean TTFT of each stage)."""
    folder.mkdir()
    lines = [
        {
            **dict.fromkeys(SAME, None),
            "contender": name,
            "phase": phase,
            "parameters": {"alpha": 1, "num_prompts": stage_size * len(times), "rounds": len(times)},
            "requests": stage_size * len(times),
            "ttft_ms_stages": times,
            "duration_s_stages": [-time for time in times],
        }
        for name, phase, times in rows
    ]
    (folder / "environment.json").write_text(json.dumps({"command": "bench.py --together"}))
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_known_answer():
    """Differences of 1, 2 and 6 ms at a mean of 20: 15% on average; Student's t for 2 degrees of freedom is 4.303."""
    found = compare([(11, 10), (22, 20), (36, 30)])
    assert (found["first"], found["second"]) == (23, 20)
    assert found["mean"] == pytest.approx(15)
    assert found["median"] == pytest.approx(10)
    assert found["half_width"] == pytest.approx(4.303 * np.std([5, 10, 30], ddof=1) / 3**0.5, rel=1e-3)
    assert compare([(11, 10)])["half_width"] == float("inf")


def test_the_interval_has_its_nominal_coverage():
    """The true difference is in 95 of 100 intervals, within 4.5 standard errors, however much both contenders drift
    together."""
    rng = np.random.default_rng(0)
    hits, trials = 0, 2000
    for _ in range(trials):
        drift = rng.normal(0, 50, 8)
        pairs = np.stack([1020 + drift + rng.normal(0, 5, 8), 1000 + drift + rng.normal(0, 5, 8)], axis=1)
        found = compare(pairs.tolist())
        true = 100 * 20 / found["second"]
        hits += abs(found["mean"] - true) < found["half_width"]
    assert abs(hits / trials - 0.95) < 4.5 * (0.95 * 0.05 / trials) ** 0.5


def test_pooling(tmp_path):
    """Repetitions within a folder and across folders are pooled by case and phase, each paired within its own run;
    stages of another size are another case."""
    one = write_rows(
        tmp_path / "one",
        ("lazy", "cold", [1]), ("stock", "cold", [2]), ("stock", "warm", [4]), ("lazy", "warm", [3]),
        ("stock", "cold", [6]), ("lazy", "cold", [5]), ("copy", "cold", [9]),
        ("lazy", "hot", [9]),
    )  # fmt: skip
    other = write_rows(tmp_path / "other", ("stock", "cold", [8, 10]), ("lazy", "cold", [7, 9]))
    larger = write_rows(tmp_path / "larger", ("stock", "cold", [8]), ("lazy", "cold", [7]), stage_size=5)
    found = paired_stages([one, other, larger], "lazy", "stock")
    cases = {(case["phase"], case["requests"]): found[key] for key in found for case in [json.loads(key)]}
    assert cases == {
        ("cold", 4): [(1, 2), (5, 6), (7, 8), (9, 10)],
        ("warm", 4): [(3, 4)],
        ("cold", 5): [(7, 8)],
    }
    assert list(paired_stages([larger], "lazy", "stock", "duration_s").values()) == [[(-7, -8)]]


def test_what_cannot_be_paired(tmp_path):
    folder = write_rows(tmp_path / "one", ("lazy", "cold", [1, 2]), ("stock", "cold", [3]))
    with pytest.raises(ValueError, match="different stages"):
        paired_stages([folder], "lazy", "stock")
    with pytest.raises(ValueError, match="no case was sent to both"):
        paired_stages([folder], "lazy", "copy")
    (folder / "environment.json").write_text(json.dumps({"command": "bench.py"}))
    with pytest.raises(ValueError, match="did not take turns"):
        paired_stages([folder], "lazy", "stock")

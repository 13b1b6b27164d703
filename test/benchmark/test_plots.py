"""Which rows share a figure, and the ratios between contenders."""

import json

import pytest

pytest.importorskip("matplotlib", reason="matplotlib, which draws the figures, is not installed")
from benchmark.serving.plots import FIGURES, draw_all, groups, with_ratios

RATE, POOL, CONTEXT, SKEW = FIGURES


def row(
    contender="lazy",
    *,
    model="m",
    workload="synthetic",
    rate=1.0,
    pool_gb=10.0,
    phase="steady",
    ttft=100.0,
    **parameters,
):
    return {
        "contender": contender,
        "model": model,
        "workload": workload,
        "parameters": {"alpha": 1.1, "num_prompts": 9, **parameters},
        "request_rate": rate,
        "kv_pool_gb": pool_gb,
        "max_concurrency": None,
        "phase": phase,
        "ttft_ms_p50": ttft,
        "ttft_ms_p99": 2 * ttft,
        "request_throughput": 1000 / ttft,
        "hit_rate": 0.5,
        "prompt_tokens": 900,
        "requests": 9,
    }


def test_groups():
    """All contenders of one case share a figure; other parameters or models have another; a single point makes none."""
    rows = [row(name, rate=rate, num_prompts=10 * rate) for name in ("lazy", "stock") for rate in (1.0, 2.0)]
    rows += [row(alpha=0.0, rate=rate) for rate in (1.0, 2.0)] + [row(alpha=2.0)]
    assert [len(group) for group in groups(rows, RATE).values()] == [4, 2]
    assert groups(rows, POOL) == {}
    assert [len(group) for group in groups(rows, SKEW).values()] == [4, 3]  # at rate 1: alpha 0, 1.1 twice, 2
    assert groups([row(model=model, rate=rate) for model, rate in (("m", 1.0), ("n", 2.0))], RATE) == {}
    pools = [row(pool_gb=size) for size in (10.0, 30.0)]
    assert [len(group) for group in groups(pools, POOL).values()] == [2]


def test_ratios():
    """How many times better ours is, for the same case and phase only."""
    rows = [row(ttft=100.0), row("stock", ttft=150.0), row("stock", ttft=150.0, phase="cold")]
    ours, steady, cold = with_ratios(rows)
    assert steady["ttft_ratio"] == pytest.approx(1.5)
    assert steady["throughput_ratio"] == pytest.approx(1.5)
    assert "ttft_ratio" not in ours and "ttft_ratio" not in cold


def test_files(tmp_path):
    """PNG and SVG with every contender, and the published figures."""
    folder = tmp_path / "results"
    folder.mkdir()
    environment = {"gpu": None, "machine": "here", "commit": "c0ffee"}
    (folder / "environment.json").write_text(json.dumps(environment))
    rows = [row(name, alpha=alpha) for name in ("lazy", "stock") for alpha in (0.0, 1.1)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    assert draw_all([folder], tmp_path) == [tmp_path / "skew-synthetic-1.png"]
    assert (tmp_path / "skew-synthetic-1.png").stat().st_size > 0
    assert "<svg" in (tmp_path / "skew-synthetic-1.svg").read_text()
    with pytest.raises(ValueError, match="is no results folder"):
        draw_all([tmp_path / "none"], tmp_path)

"""The benchmark command: every family on tiny shapes, the check before any timing, and its output."""

import json
import re

import pytest
import torch
from ragged import DEVICE

from sgl_kernel_lazy import torch_impl
from sgl_kernel_lazy.bench import copies, report, verify
from sgl_kernel_lazy.bench.__main__ import main, parse
from sgl_kernel_lazy.bench.problem import Dims, build
from sgl_kernel_lazy.bench.shapes import FAMILIES, SHARED, shapes

without_gpu = pytest.mark.skipif(DEVICE != "cpu", reason="tiny shapes are for machines without a GPU")


@without_gpu
def test_every_family_is_checked_and_timed(tmp_path, capsys):
    command = ["--quick", "--implementations", "torch", "--fp8", "--commit", "abc", "--out", str(tmp_path)]
    assert main(command) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    full, half = ([row for row in result["rows"] if row["implementation"] == name] for name in ("torch", "torch, e4m3"))
    assert [2 * row["bytes"] for row in half] == [row["bytes"] for row in full]
    assert {row["family"] for row in result["rows"]} == set(FAMILIES)
    for row in result["rows"]:
        assert 0 < row["p20"] <= row["p50"] <= row["p80"] and row["error"] <= row["budget"]
        assert ("step_ms" in row) == (row["op"] == "decode")
    assert result["header"]["commit"] == "abc" and result["header"]["torch"] == torch.__version__
    assert "baseline" in result["skipped"]
    assert f"{len(result['rows'])} measured, 0 failed" in capsys.readouterr().out


@without_gpu
def test_copies_are_timed(capsys):
    copies.main(["--quick", "--commit", "abc"])
    output = capsys.readouterr().out
    row = output.splitlines()[-1].split()
    assert row[:2] == ["2048", "2"] and float(row[3]) > 0
    assert "commit: abc" in output


@without_gpu
def test_a_wrong_result_is_not_timed(tmp_path, monkeypatch):
    right = torch_impl.link_decode
    monkeypatch.setattr(torch_impl, "link_decode", lambda *given, out, **rest: right(*given, out=out, **rest).mul_(1.1))
    command = ["--quick", "--shapes", "decode", "--implementations", "torch", "--out", str(tmp_path)]
    assert main(command) == 1
    for row in json.loads((tmp_path / "bench.json").read_text())["rows"]:
        assert "p50" not in row and row["failed"].startswith("ValueError: error ")


def test_an_unknown_name_is_an_error(capsys):
    for option in ("--shapes", "--implementations"):
        with pytest.raises(SystemExit):
            parse([option, "nothing"])
        assert "expected some of" in capsys.readouterr().err


def test_help_explains_every_column(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    assert report.COLUMNS.keys() <= set(re.findall(r"\w+", capsys.readouterr().out))


@pytest.mark.parametrize("tiny", [True, False])
def test_shared_chunks_are_shared_slots(tiny):
    """A request draws distinct chunks; chunks drawn by several requests count once; draws repeat with the seed."""
    drawn = list(shapes(["shared"], tiny=tiny))
    assert tiny or len(drawn) == len(SHARED)
    for shape in drawn:
        ids = [[part[1] for part in request if part[0] == "chunk"] for request in shape.requests]
        assert all(len(set(request)) == len(request) for request in ids)
    assert [shape.requests for shape in shapes(["shared"], tiny=tiny)] == [shape.requests for shape in drawn]
    if tiny:
        groups = drawn[1]
        problem = build(groups, Dims(torch.bfloat16, torch.device("cpu"), 4, 2, 64), 0, 0)
        assert problem.tokens == 2 * 2 * 8 + 9 * 4
        assert len(problem.tables["kv_indices"].unique()) == problem.tokens


def test_unwritten_rows_are_found():
    shape = shapes(["decode"], tiny=True)[1]
    problem = build(shape, Dims(torch.float16, torch.device("cpu"), 4, 2, 64), 0, 0)
    reference = verify.Reference(problem)
    out, lse = (t.clone() for t in reference(True)[torch.float64])
    verify.check(out, lse, reference, True)
    out[0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="not written"):
        verify.check(out, lse, reference, True)

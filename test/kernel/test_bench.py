"""The benchmark command: every family on tiny shapes, the check before any timing, and its output."""

import dataclasses
import functools
import json
import re

import pytest
import torch
from ragged import DEVICE

from benchmark.kernels import copies, report, timing, verify
from benchmark.kernels.__main__ import main, parse
from benchmark.kernels.baseline import Baseline
from benchmark.kernels.candidates import Link
from benchmark.kernels.problem import Dims, build
from benchmark.kernels.shapes import FAMILIES, SHARED, shapes
from benchmark.kernels.window_rows import WindowRows
from sgl_kernel_lazy import torch_impl

CPU = torch.device("cpu")
without_gpu = pytest.mark.skipif(DEVICE != "cpu", reason="tiny shapes are for machines without a GPU")


@without_gpu
def test_every_family_is_checked_and_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(timing, "LAYERS", 2)
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


def fails(kind, name, shape, dtype=torch.bfloat16):
    """Whether the result of an implementation on a shape is wrong."""
    problem = build(shape, Dims(dtype, CPU, 4, 2, 64), 0, 0)
    candidate, out = kind(name, problem), torch.full_like(problem.q, float("nan"))
    lse = torch.full(out.shape[:2], float("nan"))
    candidate.plan()
    candidate.call(0, out, lse)
    try:
        verify.check(out, lse, verify.Reference(problem), candidate.rotated)
    except ValueError:
        return True
    return False


def without_cap(right, q, layer, rows, **given):
    return right(q, dataclasses.replace(layer, logit_cap=None), rows, **given)


def in_halves(right, q, layer, rows, **given):
    return right(q, dataclasses.replace(layer, is_neox=True), rows, **given)


def whole_heads(right, q, layer, rows, **given):
    if (rotary_dim := layer.cos_sin_cache.shape[1]) < 128:
        table = layer.cos_sin_cache.repeat_interleave(128 // rotary_dim, dim=1)
        layer = dataclasses.replace(layer, cos_sin_cache=table)
    return right(q, layer, rows, **given)


def a_token_too_many(right, q, layer, rows, **given):
    return right(q, dataclasses.replace(layer, window=layer.window and layer.window + 1), rows, **given)


def a_token_early(right, rows, tables, queries):
    right(rows, tables, dataclasses.replace(queries, first=-1))


@pytest.mark.parametrize(
    ("family", "kind", "op", "wrong", "found"),
    [
        ("gemma", Link, "link_decode", without_cap, ["Gemma 2 9B, decode"]),
        ("gemma", Link, "link_extend", without_cap, ["Gemma 2 9B, extend"]),
        ("gemma", Link, "link_extend", a_token_too_many, ["Gemma 3 12B, extend"]),
        ("ropes", Link, "link_decode", in_halves, ["GLM-4 9B, decode", "Command R, decode"]),
        ("ropes", Link, "link_decode", whole_heads, ["GLM-4.5, decode", "GLM-4 9B, decode"]),
        ("rows", WindowRows, "window_rows", a_token_early, ["gpt-oss 20B, decode", "Gemma 3 12B, decode"]),
    ],
)
def test_what_is_special_about_a_shape_is_checked(family, kind, op, wrong, found, monkeypatch):
    """An implementation that ignores it fails on these shapes, and on no others."""
    monkeypatch.setattr(torch_impl, op, functools.partial(wrong, getattr(torch_impl, op)))
    failed = [shape for shape in shapes([family], tiny=True) if fails(kind, "torch", shape)]
    assert [f"{shape.name.split(',')[0]}, {shape.op}" for shape in failed] == found


@without_gpu
@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma", "ropes", "rows"])
def test_triton_is_right_on_models(family):
    """Under the interpreter, which takes fp16 but not bf16."""
    kind = WindowRows if family == "rows" else Link
    assert not any(fails(kind, "triton", shape, torch.float16) for shape in shapes([family], tiny=True))


@pytest.mark.parametrize("family", ["gemma", "ropes", "rows"])
def test_models_have_the_kernels_of_a_server(family, monkeypatch):
    """With --first and cuda,triton on Hopper: Gemma 4's heads of 512 are the only ones that CUDA refuses."""
    monkeypatch.setattr("sgl_kernel_lazy.cuda.missing", lambda device: None)
    for shape in shapes([family], tiny=True):
        problem = build(shape, Dims(torch.bfloat16, CPU, 4, 2, 64), 0, 0)
        refused = [name for name in ("cuda", "triton") if Link.refusal(name, problem)]
        assert refused == (["cuda"] if shape.name.startswith("Gemma 4") else []), shape.name
        assert [name for name in ("fa2", "fa3") if Baseline.refusal(name, problem)] == ["fa3"] * len(refused)


@without_gpu
def test_first_measures_what_takes_a_shape(tmp_path):
    command = ["--quick", "--shapes", "rows", "--out", str(tmp_path)]
    for first, names in ([], ["torch", "torch"]), (["--first"], ["torch"]):
        assert main([*command, *first, "--implementations", "cuda,torch,torch"]) == 0
        rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
        for op, prefix in dict(decode="", window_rows="window_rows, ").items():
            of = [row for row in rows if row["op"] == op and row["shape"].startswith("gpt-oss")]
            assert [row["implementation"] for row in of if "p50" in row] == [prefix + name for name in names]
            assert [row["refused"] for row in of if "p50" not in row] == ["the kernels need a Hopper GPU"]


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

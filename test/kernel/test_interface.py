"""What the package promises around the ops: one interface, errors that name things, a cheap import, kernels that
compile for sm_90."""

import inspect
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from ragged import DEVICE, NAN, packed, random_batch, run

import sgl_kernel_lazy
from benchmark.kernels.candidates import implementation
from sgl_kernel_lazy import get_implementation
from sgl_kernel_lazy.layer import LayerKind

HERE = pathlib.Path(__file__).parent


def python(*arguments):
    """Run a fresh interpreter that finds the package and does not interpret Triton."""
    path = str(pathlib.Path(sgl_kernel_lazy.__file__).parents[1])
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def test_import_is_cheap():
    done = python("-c", "import sys, sgl_kernel_lazy; assert not {'torch', 'triton'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_kernels_compile_for_sm90():
    pytest.importorskip("triton")
    done = python(str(HERE / "compile_sm90.py"), "--quick")
    assert done.returncode == 0, done.stderr


OPS = (
    "accumulate_attention", "copy_rotated", "decode_workspace", "link_decode", "link_extend", "link_states",
    "plan_decode", "unsupported", "whole_rows", "window_rows",
)  # fmt: skip


def parameters(implementation, op):
    return {p.name: (p.kind, p.default) for p in inspect.signature(getattr(implementation, op)).parameters.values()}


@pytest.mark.parametrize("name", [name for name in sgl_kernel_lazy.IMPLEMENTATIONS if name != "torch"])
@pytest.mark.parametrize("op", OPS)
def test_all_implementations_have_one_interface(name, op):
    actual, expected = (parameters(get_implementation(each), op) for each in (name, "torch"))
    assert list(actual.items()) == list(expected.items())


@pytest.mark.parametrize("op", OPS)
def test_what_the_benchmark_compares_with_has_it_too(op):
    """`link_extend` takes a plan, by keyword and with a default."""
    pytest.importorskip("flashinfer")
    actual = parameters(implementation("flashinfer"), op)
    if op == "link_extend":
        assert actual.pop("plan") == (inspect.Parameter.KEYWORD_ONLY, None)
    assert list(actual.items()) == list(parameters(get_implementation("torch"), op).items())


HOPPER = dict(
    dtype=torch.bfloat16, kv_dtype=torch.bfloat16, num_qo_heads=32, num_kv_heads=8, head_dim=128, rotary_dim=128,
)  # fmt: skip
REFUSED = {
    "queries in torch.float16 or torch.bfloat16, got torch.float32": dict(dtype=torch.float32, kv_dtype=torch.float32),
    "head_dim to be one of .*, got 96": dict(head_dim=96, rotary_dim=96),
    "head_dim to be one of .*, got 512": dict(head_dim=512, rotary_dim=512),
    "rotary_dim to be a multiple of 16, got 24": dict(rotary_dim=24),
    "at most 32 query heads per kv head, got 64": dict(num_qo_heads=64, num_kv_heads=1),
    "at most 16 query heads per kv head, got 32": dict(num_kv_heads=1, head_dim=256),
    "for torch.float8_e4m3fn caches head_dim 64 or 128": dict(head_dim=256, kv_dtype=torch.float8_e4m3fn),
    "for torch.float8_e5m2 caches .* got 64, 64 and 1 heads": dict(
        num_qo_heads=5, num_kv_heads=5, head_dim=64, rotary_dim=64, kv_dtype=torch.float8_e5m2
    ),
    "at most .* segments per request, got 100000": dict(max_segments=100000),
    "at most 949 segments per request, got 1000": dict(max_segments=1000, windowed=True),
}


def unsupported(name, device, max_segments=256, **kind):
    return get_implementation(name).unsupported(torch.device(device), LayerKind(**HOPPER | kind), max_segments)


@pytest.mark.parametrize("reason", REFUSED)
def test_cuda_names_what_it_cannot_serve(monkeypatch, reason):
    monkeypatch.setattr(get_implementation("cuda"), "missing", lambda device: None)
    assert unsupported("cuda", "cuda") is None
    assert re.match(f"expected {reason}", unsupported("cuda", "cuda", **REFUSED[reason]))


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_others_take_any_number_of_segments(name):
    assert unsupported(name, "cpu", max_segments=100000) is None


def test_unknown_implementation():
    with pytest.raises(ValueError, match="expected one of .*'torch'.*got 'cpu'"):
        get_implementation("cpu")


MISTAKES = {
    "q": lambda t: t.long(),
    "k_cache": lambda t: t[0],
    "v_cache": lambda t: t.double(),
    "kv_indptr": lambda t: t[:-1],
    "kv_indices": lambda t: t.float(),
    "num_segments": lambda t: t.long(),
    "segment_ends": lambda t: t[0],
    "segment_offsets": lambda t: t.to("meta"),
    "segment_ids": lambda t: t[:, 1:],
    "cos_sin_cache": lambda t: t.bfloat16(),
    "out": lambda t: t[:1],
    "lse": lambda t: t.half(),
    "sinks": lambda t: t[1:],
    "qo_indptr": lambda t: t[1:],
    "q_positions": lambda t: t.float(),
    "kv_positions": lambda t: t.long(),
}


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_a_layer_and_its_batch_are_on_one_device(op, name):
    caches = ("k_cache", "v_cache", "cos_sin_cache")
    inputs = random_batch(0).extend
    with pytest.raises(ValueError, match=f"^k_cache: expected device {DEVICE}.*, got meta"):
        run(op, get_implementation(name), random_batch(0), **{each: inputs[each].to("meta") for each in caches})


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("cap", [0, -1.0, float("nan")])
def test_a_logit_cap_must_be_positive(op, cap, name):
    batch = random_batch(0)
    batch.options["logit_cap"] = cap
    with pytest.raises(ValueError, match="^logit_cap: expected a positive number or None, got "):
        run(op, get_implementation(name), batch)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("argument", MISTAKES)
@pytest.mark.parametrize("op", ["decode", "extend"])
def test_a_wrong_tensor_is_named(op, argument, name):
    batch = random_batch(0)
    inputs = batch.decode if op == "decode" else batch.extend
    inputs = dict(
        inputs,
        out=torch.empty_like(inputs["q"]),
        lse=torch.empty(inputs["q"].shape[:2], device=inputs["q"].device),
        sinks=torch.zeros(inputs["q"].shape[1], device=inputs["q"].device),
    )
    if op == "decode":
        inputs["segment_ids"] = batch.segment_ids
    if argument not in inputs:
        pytest.skip(f"link_{op} takes no {argument}")
    options = dict(batch.options) | ({"max_extend_len": batch.max_extend_len} if op == "extend" else {})
    inputs[argument] = MISTAKES[argument](inputs[argument])
    with pytest.raises(ValueError, match=f"^{argument}: expected .*, got "):
        getattr(get_implementation(name), f"link_{op}")(**packed(**inputs, **options))


@pytest.mark.parametrize("argument", ["q", "v_cache", "kv_indices", "segment_ends", "kv_positions"])
def test_a_last_dimension_with_gaps_is_refused(argument):
    batch = random_batch(0)
    gaps = batch.extend[argument].repeat_interleave(2, dim=-1)[..., ::2]
    with pytest.raises(ValueError, match=f"^{argument}: expected a contiguous last dimension, got strides "):
        run("extend", get_implementation("torch"), batch, **{argument: gaps})


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("op", ["decode", "extend"])
@pytest.mark.parametrize("scale", [0.0, -0.1, NAN])
def test_scales_must_be_positive(op, name, scale):
    with pytest.raises(ValueError, match="sm_scale: expected a positive number, got "):
        run(op, get_implementation(name), random_batch(0), sm_scale=scale)


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("window", [0, -1, 2.0])
def test_a_window_must_be_positive(name, window):
    with pytest.raises(ValueError, match="window: expected a positive int or None, got "):
        run("extend", get_implementation(name), random_batch(0), window=window)


@pytest.mark.parametrize("op", ["decode", "extend"])
def test_slots_beyond_int32_are_refused(op):
    batch = random_batch(0)
    for inputs in (batch.decode, batch.extend):
        inputs["k_cache"] = inputs["k_cache"][:1].expand(2**31 + 1, -1, -1)
    with pytest.raises(ValueError, match=r"^k_cache: expected at most 2\*\*31 slots, got 2147483649"):
        run(op, get_implementation("triton"), batch)


def test_errors_give_expected_and_actual_values():
    batch = random_batch(0)
    batch.extend["kv_indptr"] = batch.extend["kv_indptr"][:-1]
    with pytest.raises(ValueError, match=r"kv_indptr: expected shape \[4\], got \[3\]"):
        run("decode", get_implementation("torch"), batch)

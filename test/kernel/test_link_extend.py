"""link_extend: every implementation against the formula in fp64, and the formula's own properties."""

import dataclasses
import importlib

import pytest
import torch
from cases import CASES, all_cases, all_dtypes, skip_unless_supported
from ragged import DEVICE, NAN, Shape, add_sinks, cap, check, packed, random_batch, relative_error, run

from sgl_kernel_lazy import get_implementation

implementations = pytest.mark.parametrize("name", ["torch", "triton"])


@implementations
@all_dtypes
@all_cases
def test_link_extend(name, dtype, case):
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    check("extend", get_implementation(name), random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout))


# Windows of one token, of less and more than a block of keys, and longer than the row; with and without position gaps.
WINDOWS = [
    ("ragged", 1), ("ragged", 30), ("ragged", 3000), ("group of 7, interleaved", 9), ("long chunks", 100),
    ("50 segments, spans between", 64), ("plain requests", 50), ("chunks with holes", 12), ("behind a preamble", 20),
    ("cached text behind new text", 6), ("chunked prefill goes on", 25), ("empty rows", 3), ("offsets to the end", 500),
]  # fmt: skip


@implementations
@all_dtypes
@pytest.mark.parametrize(("case", "window"), WINDOWS)
def test_windows(name, dtype, case, window):
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout)
    batch.options["window"] = window
    check("extend", get_implementation(name), batch)


@implementations
@all_dtypes
@pytest.mark.parametrize("case", ["ragged", "group of 7, interleaved", "empty rows", "plain beside linked"])
def test_sinks(name, dtype, case):
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout)
    check("extend", get_implementation(name), add_sinks(batch))


@implementations
@all_dtypes
@pytest.mark.parametrize(
    ("case", "window"),
    [("ragged", None), ("group of 7, interleaved", 9), ("empty rows", None), ("plain beside linked", 30)],
)
def test_logit_caps(name, dtype, case, window):
    """Together with sinks, which are not capped, and under windows."""
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    batch = cap(add_sinks(random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout)))
    batch.options["window"] = window
    check("extend", get_implementation(name), batch)


def test_keys_outside_of_a_window_are_not_read():
    batch = random_batch(0, Shape(bs=1), [[("chunk", 2), ("text", 70), ("chunk", 1), ("new", 3)]])
    batch.options["window"] = 2
    expected, _ = run("extend", get_implementation("triton"), batch)
    num_kv = int(batch.extend["kv_indptr"][-1])
    far = batch.extend["kv_positions"][:num_kv] < int(batch.extend["q_positions"][0]) - 64
    outside = batch.extend["kv_indices"][:num_kv][far].long()
    batch.extend["k_cache"][outside] = batch.extend["v_cache"][outside] = NAN
    assert len(outside) > 40 and torch.equal(run("extend", get_implementation("triton"), batch)[0], expected)


@implementations
def test_row_that_sees_nothing_is_zero(name):
    """A query row before every KV token gives zeros and -inf; its neighbours in the tile are unaffected."""
    batch = random_batch(0, Shape(bs=1), [[("gap", 5), ("chunk", 1), ("new", 6)]])
    inputs = dict(batch.extend, q_positions=batch.extend["q_positions"].clone())
    inputs["q_positions"][[0, 3]] = torch.tensor([0, 4], dtype=inputs["q_positions"].dtype, device=DEVICE)
    lse = torch.full((6, 4), NAN, device=DEVICE)
    out = get_implementation(name).link_extend(**packed(**inputs, **batch.options, max_extend_len=6, lse=lse))
    assert torch.equal(out[[0, 3]], torch.zeros_like(out[[0, 3]]))
    assert (lse[[0, 3]] == -torch.inf).all()
    expected, _ = run("extend", get_implementation(name), batch)
    assert relative_error(out[[1, 2, 4, 5]], expected[[1, 2, 4, 5]]) < 1e-6


@implementations
def test_one_segment_at_offset_zero_is_ordinary_attention(name):
    implementation = get_implementation(name)
    batch = random_batch(0, Shape(bs=1), [[("chunk", 2), ("new", 12)]])
    linked, _ = run("extend", implementation, batch)
    batch.extend["num_segments"].zero_()
    plain, _ = run("extend", implementation, batch)
    assert relative_error(linked, plain) < 1e-6


@implementations
def test_shifting_every_position_changes_nothing(name):
    implementation = get_implementation(name)
    layout = [("chunk", 1), ("new", 2), ("chunk", 2), ("chunk", 3), ("new", 9)]
    near, far = (random_batch(3, Shape(bs=1), [[("gap", gap), *layout]]) for gap in (0, 700))
    assert relative_error(run("extend", implementation, far)[0], run("extend", implementation, near)[0]) < 1e-5


@implementations
def test_last_row_equals_decode(name):
    """The last new token sees everything, so both ops must agree on it."""
    implementation = get_implementation(name)
    batch = random_batch(4, Shape(bs=5))
    last = (batch.extend["qo_indptr"][1:] - 1).long()
    extended, extended_lse = run("extend", implementation, batch)
    decoded, decoded_lse = run("decode", implementation, batch)
    assert relative_error(extended[last], decoded) < 2e-6
    assert (extended_lse[last] - decoded_lse).abs().max() < 2e-6


@implementations
def test_strided_rows(name):
    implementation = get_implementation(name)
    batch = random_batch(5)
    expected, _ = run("extend", implementation, batch)
    wide = torch.full((len(expected), 8, 64), NAN, device=DEVICE)
    wide[:, :4] = batch.extend["q"]
    out = torch.full_like(wide, NAN)
    inputs = dict(batch.extend, q=wide[:, :4])
    implementation.link_extend(**packed(**inputs, **batch.options, max_extend_len=batch.max_extend_len, out=out[:, :4]))
    assert torch.equal(out[:, :4], expected)
    assert out[:, 4:].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("block_m, num_splits", [(16, 2), (64, 8)])
def test_any_number_of_splits(monkeypatch, block_m, num_splits):
    """Splits end within segments, within text, and past the end of a row."""
    module = importlib.import_module("sgl_kernel_lazy.triton.link_extend")
    monkeypatch.setattr(module, "_plan", lambda *shape: (block_m, num_splits))
    linked = [("text", 7), ("chunk", 2), ("new", 3), ("chunk", 1), ("new", 9)]
    late = CASES["cached text behind new text"][2][0]
    batch = random_batch(0, Shape(num_qo_heads=2, num_kv_heads=1, bs=4), [linked, late, [("new", 20)], []])
    check("extend", get_implementation("triton"), batch)
    check("extend", get_implementation("triton"), add_sinks(batch))


def test_the_reference_takes_long_tails_in_steps(monkeypatch):
    module = get_implementation("torch")
    batch = random_batch(7)
    whole, _ = run("extend", module, batch)
    monkeypatch.setattr(module, "MAX_SCORES", 1)
    assert relative_error(run("extend", module, batch)[0], whole) < 1e-6

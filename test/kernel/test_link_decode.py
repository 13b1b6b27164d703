"""link_decode: every implementation against the formula in fp64, and the formula's own properties."""

import dataclasses
import importlib

import pytest
import torch
from cases import CASES, all_cases, all_dtypes, skip_unless_supported
from ragged import DEVICE, NAN, Shape, add_sinks, cap, check, naive, packed, random_batch, relative_error, run

from sgl_kernel_lazy import get_implementation

implementations = pytest.mark.parametrize("name", ["torch", "triton"])


@implementations
@all_dtypes
@all_cases
def test_link_decode(name, dtype, case):
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    check("decode", get_implementation(name), random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout))


@implementations
@all_dtypes
@pytest.mark.parametrize("case", ["ragged", "group of 7, interleaved", "empty rows", "plain beside linked"])
def test_sinks(name, dtype, case):
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout)
    check("decode", get_implementation(name), add_sinks(batch))


@implementations
@all_dtypes
@pytest.mark.parametrize("case", ["ragged", "group of 7, interleaved", "empty rows", "plain beside linked"])
def test_logit_caps(name, dtype, case):
    """Together with sinks, which are not capped."""
    skip_unless_supported(name, dtype, case)
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout)
    check("decode", get_implementation(name), cap(add_sinks(batch)))


@implementations
def test_segments_that_have_left_a_window(name):
    """They are empty and come first; text between segments is a segment of offset 0."""
    implementation = get_implementation(name)
    batch = random_batch(0, Shape(bs=1), [[("chunk", 2), ("chunk", 1), ("new", 1)]])
    expected, _ = run("decode", implementation, batch)
    for table, first in (("segment_ends", [0, 0]), ("segment_offsets", [5, 0])):
        values = [*first, *batch.extend[table][0, :2].tolist()]
        batch.extend[table] = torch.tensor([values], dtype=torch.int32, device=DEVICE)
    batch.segment_ids = torch.full_like(batch.extend["segment_ends"], -1)
    batch.extend["num_segments"] += 2
    assert torch.equal(run("decode", implementation, batch)[0], expected)


@implementations
def test_leftover_segments_end_with_their_row(name):
    """A row that pads a batch has one KV token, and segments of the request that had the row before."""
    chunks = [("chunk", 2), ("text", 3), ("chunk", 1), ("new", 2)]
    batch = random_batch(0, Shape(bs=3), [chunks, [("chunk", 0)], chunks])
    offsets = batch.extend["segment_offsets"].clone()
    expected, _ = run("decode", get_implementation(name), batch)
    for table in ("num_segments", "segment_ends", "segment_offsets"):
        batch.extend[table] = batch.extend[table][[0, 0, 2]]
    batch.extend["segment_offsets"][1, 0] = offsets[1, 0]
    batch.segment_ids = batch.segment_ids[[0, 0, 2]]
    assert relative_error(run("decode", get_implementation(name), batch)[0], expected) < 1e-6


@implementations
def test_empty_row_is_zero(name):
    """A padding row has no KV tokens and garbage segments beyond num_segments; it must not give NaN."""
    batch = random_batch(0, Shape(bs=3), [[], [("new", 1)], []])
    inputs = batch.decode
    inputs["q"] = torch.cat(
        [inputs["q"].new_full((1, 4, 64), NAN), batch.extend["q"], inputs["q"].new_full((1, 4, 64), NAN)]
    )
    lse = torch.full((3, 4), NAN, device=DEVICE)
    out = get_implementation(name).link_decode(**packed(**inputs, **batch.options, lse=lse))
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert (lse[[0, 2]] == -torch.inf).all() and lse[1].isfinite().all()


@implementations
def test_empty_batch(name):
    implementation = get_implementation(name)
    batch = random_batch(0, Shape(bs=1), [[("new", 1)]])
    inputs = batch.decode
    for key in ("q", "num_segments", "segment_ends", "segment_offsets"):
        inputs[key] = inputs[key][:0]
    inputs["kv_indptr"] = inputs["kv_indptr"][:1]
    assert implementation.link_decode(**packed(**inputs, **batch.options)).shape == (0, 4, 64)


@implementations
def test_one_segment_at_offset_zero_is_ordinary_attention(name):
    implementation = get_implementation(name)
    batch = random_batch(0, Shape(bs=1), [[("chunk", 2), ("new", 1)]])
    linked, _ = run("decode", implementation, batch)
    batch.extend["num_segments"].zero_()
    plain, _ = run("decode", implementation, batch)
    # Blocks end at the ends of segments, so the order of summation may differ.
    assert relative_error(linked, plain) < 1e-6


@implementations
def test_shifting_every_position_changes_nothing(name):
    implementation = get_implementation(name)
    chunks = [("chunk", 1), ("chunk", 2), ("chunk", 3)]
    outputs = []
    for gap in (0, 700):
        batch = random_batch(3, Shape(bs=1), [[("gap", gap), *chunks, ("new", 2)]])
        outputs.append(run("decode", implementation, batch)[0])
        reference = naive("decode", batch, torch.float64)[0]
    assert relative_error(outputs[0], reference) < 1e-5
    assert relative_error(outputs[1], reference) < 1e-5


@implementations
def test_strided_rows(name):
    """q and out may be slices of wider rows, as in a fused QKV projection; the rest stays untouched."""
    implementation = get_implementation(name)
    batch = random_batch(5)
    inputs, expected = batch.decode, run("decode", implementation, batch)[0]
    wide = torch.full((batch.shape.bs, 4 + 2 * 2, 64), NAN, device=DEVICE)
    wide[:, :4] = inputs["q"]
    inputs["q"] = wide[:, :4]
    out = torch.full_like(wide, NAN)
    implementation.link_decode(**packed(**inputs, **batch.options, out=out[:, :4]))
    assert torch.equal(out[:, :4], expected)
    assert out[:, 4:].isnan().all()


def test_a_workspace_serves_every_smaller_batch():
    implementation = get_implementation("triton")
    batch = random_batch(6)
    workspace = implementation.decode_workspace(64, 8, 4, 2, 64, DEVICE).fill_(NAN)
    out = implementation.link_decode(**packed(**batch.decode, **batch.options, workspace=workspace))
    assert torch.equal(out, run("decode", implementation, batch)[0])


@pytest.mark.parametrize("bs", [1, 5])
@pytest.mark.parametrize("num_spans", [1, 3, 20])
def test_any_number_of_splits(monkeypatch, bs, num_spans):
    """From one span for all requests down to spans of a single block."""
    module = importlib.import_module("sgl_kernel_lazy.triton.link_decode")
    monkeypatch.setattr(module, "_plan", lambda *shape: (16, num_spans))
    check("decode", module, add_sinks(random_batch(bs, Shape(bs=bs, max_chunk_len=150))))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_graph_replay_follows_its_inputs():
    """A graph captured over one batch is right for another of the same shape."""
    implementation = get_implementation("triton")
    shape = Shape(bs=4, dtype=torch.bfloat16, max_segments=6)
    batches = [random_batch(seed, shape) for seed in range(3)]
    size = {k: [max(d) for d in zip(*(b.decode[k].shape for b in batches), strict=True)] for k in batches[0].decode}
    static = {
        k: t.new_zeros(size[k], dtype=torch.int64 if k == "kv_indices" else t.dtype)
        for k, t in batches[0].decode.items()
    }
    options = dict(batches[0].options, workspace=implementation.decode_workspace(4, 8, 4, 2, 64, DEVICE).fill_(NAN))
    options |= dict(out=torch.full_like(static["q"], NAN), lse=torch.empty(4, 4, device=DEVICE))
    given = packed(**static, **options)
    implementation.link_decode(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        implementation.link_decode(**given)
    for batch in batches:
        for key, tensor in batch.decode.items():
            static[key][tuple(slice(n) for n in tensor.shape)] = tensor
        graph.replay()
        exact, plain = naive("decode", batch, torch.float64)[0], naive("decode", batch, shape.dtype)[0]
        assert relative_error(options["out"], exact) <= 2 * relative_error(plain, exact)

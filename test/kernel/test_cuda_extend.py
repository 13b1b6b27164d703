"""link_extend in CUDA against the formula in fp64, on the shapes of every implementation and on its own edge cases."""

import dataclasses
import importlib

import pytest
import torch
from cases import CASES, all_cases
from ragged import DEVICE, NAN, Shape, add_sinks, cap, check, packed, quantise, random_batch, relative_error, run

from oracle.linked_attention import naive_link_extend

if DEVICE != "cuda" or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
pytest.importorskip("flashinfer", reason="its JIT builds the CUDA modules")
module = importlib.import_module("sgl_kernel_lazy.cuda.link_extend")

CONFIGURATIONS = {
    "bf16": dict(dtype=torch.bfloat16, head_dim=128, rotary_dim=128, is_neox=True),
    "fp16, interleaved": dict(dtype=torch.float16, head_dim=128, rotary_dim=128, is_neox=False),
    "head_dim 64": dict(dtype=torch.bfloat16, head_dim=64, rotary_dim=64, is_neox=True),
    "partial": dict(dtype=torch.float16, head_dim=64, rotary_dim=48, is_neox=True),
    "head_dim 256": dict(dtype=torch.bfloat16, head_dim=256, rotary_dim=64, is_neox=True),
    "head_dim 256, interleaved": dict(dtype=torch.float16, head_dim=256, rotary_dim=256, is_neox=False),
}
all_configurations = pytest.mark.parametrize("configuration", CONFIGURATIONS)
fp8_configurations = pytest.mark.parametrize("configuration", ["bf16", "fp16, interleaved", "head_dim 64"])
all_fp8 = pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
all_heads = pytest.mark.parametrize("heads", [(8, 2), (32, 8), (12, 4), (5, 5)], ids=str)
# A million SMs make the plan split requests as finely as partial results have room: within segments and text, the
# longest request into more splits than it has tiles.
any_split = pytest.mark.parametrize(
    "blocks, max_partials",
    [((64, 128), 0), ((64, 128), 60), ((64, 64), 60), ((128, 128), 30), ((128, 128), 800)],
)


@pytest.fixture(params=[0, 2**31], ids=["long", "short"])
def both_kinds(request, monkeypatch):
    """All windows count as long, or as short; heads of 256 have one kernel for both."""
    monkeypatch.setattr(module, "SHORT_WINDOW", request.param)


@all_configurations
@all_cases
def test_link_extend(configuration, case):
    seed, shape, layout = CASES[case]
    check("extend", module, random_batch(seed, dataclasses.replace(shape, **CONFIGURATIONS[configuration]), layout))


@all_configurations
@all_heads
def test_many_tiles(configuration, heads):
    """Chunks and texts of several tiles; with 150 new tokens a request has several work items per KV head."""
    shape = Shape(*heads, **CONFIGURATIONS[configuration], max_chunk_len=700, max_text_len=150, max_position=8192)
    check("extend", module, random_batch(heads[0], shape))


@pytest.mark.parametrize(
    "configuration, window", [*((each, 30) for each in CONFIGURATIONS), ("bf16", 1), ("bf16", 500)]
)
@all_cases
def test_windows(both_kinds, case, configuration, window):
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, **CONFIGURATIONS[configuration]), layout)
    batch.options["window"] = window
    check("extend", module, batch)


@all_configurations
@all_heads
@pytest.mark.parametrize("window", [64, 128, 1000])
def test_windows_over_many_tiles(both_kinds, configuration, heads, window):
    """They start and end within tiles, and within and between runs; heads have sinks."""
    shape = Shape(*heads, **CONFIGURATIONS[configuration], max_chunk_len=700, max_text_len=150, max_position=8192)
    batch = add_sinks(random_batch(heads[0], shape))
    batch.options["window"] = window
    check("extend", module, batch)


@all_configurations
@pytest.mark.parametrize("case", ["ragged", "empty rows", "plain beside linked"])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_sinks(configuration, case, dtype):
    seed, shape, layout = CASES[case]
    batch = add_sinks(random_batch(seed, dataclasses.replace(shape, **CONFIGURATIONS[configuration]), layout))
    batch.options["sinks"] = batch.options["sinks"].to(dtype or batch.shape.dtype)
    check("extend", module, batch)


@all_configurations
@all_cases
@pytest.mark.parametrize("window", [None, 30, 500])
def test_logit_caps(configuration, case, window):
    """Together with sinks, which are not capped, and under windows."""
    seed, shape, layout = CASES[case]
    batch = cap(add_sinks(random_batch(seed, dataclasses.replace(shape, **CONFIGURATIONS[configuration]), layout)))
    batch.options["window"] = window
    check("extend", module, batch)


def cut(monkeypatch, blocks, max_partials):
    """A batch split as finely as this many partial results allow."""
    linked = [("text", 7), ("chunk", 2), ("new", 3), ("chunk", 1), ("new", 209)]
    late = CASES["cached text behind new text"][2][0]
    shape = Shape(**CONFIGURATIONS["bf16"], max_chunk_len=300, max_position=4096)
    items = (3 * -(-212 * 2 // blocks[0]) + 1) * shape.num_kv_heads
    monkeypatch.setattr(module, "_blocks", lambda *sizes: blocks)
    monkeypatch.setattr(module, "_room", lambda *sizes: (items + max_partials, max_partials))
    monkeypatch.setattr(module, "num_sms", lambda device: 10**6)
    return random_batch(0, shape, [linked, late, [("new", 200)], []])


@any_split
@pytest.mark.parametrize("window", [None, 200])
def test_any_number_of_splits(monkeypatch, blocks, max_partials, window):
    batch = add_sinks(cut(monkeypatch, blocks, max_partials))
    batch.options["window"] = window
    check("extend", module, batch)


@all_fp8
@fp8_configurations
@all_cases
def test_fp8_caches(configuration, fp8, case):
    """Against the formula on the dequantised values, within twice plain PyTorch's error on them."""
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, **CONFIGURATIONS[configuration]), layout)
    check("extend", module, batch, **quantise(batch, fp8))


@all_fp8
@fp8_configurations
@all_heads
@pytest.mark.parametrize("window", [None, 128, 1000])
def test_many_tiles_of_fp8(configuration, heads, fp8, window):
    """The rings of tiles wrap around several times; keys and values have scales."""
    shape = Shape(*heads, **CONFIGURATIONS[configuration], max_chunk_len=700, max_text_len=150, max_position=8192)
    batch = random_batch(heads[0], shape)
    batch.options["window"] = window
    check("extend", module, batch, **quantise(batch, fp8, 2.0, 0.5))


@any_split
def test_any_number_of_splits_of_fp8(monkeypatch, blocks, max_partials):
    batch = cut(monkeypatch, blocks, max_partials)
    check("extend", module, batch, **quantise(batch, torch.float8_e4m3fn, 0.5, 2.0))


@pytest.mark.parametrize("bs", [2, 32, 33, 100])
def test_one_long_request_among_short_ones(bs):
    """Only the long one is split; from 33 requests on, another rule decides."""
    shape = Shape(**CONFIGURATIONS["bf16"], max_chunk_len=1500, max_position=16384)
    layout = [[("chunk", 0), ("new", 1 + b % 3)] for b in range(bs - 1)]
    layout.insert(bs // 2, [*[("chunk", 2), ("text", 5)] * 7, ("new", 70)])
    check("extend", module, random_batch(bs, shape, layout))


def test_positions_out_of_order():
    """Query positions need not ascend, and a row that sees nothing gives zeros and -inf."""
    shape = Shape(**CONFIGURATIONS["bf16"], bs=1, max_chunk_len=300)
    batch = random_batch(0, shape, [[("gap", 5), ("chunk", 2), ("new", 6)]])
    batch.extend["q_positions"][[0, 3]] = torch.tensor([0, 100], device=DEVICE, dtype=batch.extend["q_positions"].dtype)
    check("extend", module, batch)
    out, lse = run("extend", module, batch)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()


def test_strided_rows():
    batch = random_batch(5, Shape(**CONFIGURATIONS["bf16"]))
    expected, _ = run("extend", module, batch)
    wide = torch.full((len(expected), 8, 128), NAN, dtype=torch.bfloat16, device=DEVICE)
    wide[:, :4] = batch.extend["q"]
    out = torch.full_like(wide, NAN)
    inputs = dict(batch.extend, q=wide[:, :4])
    module.link_extend(**packed(**inputs, **batch.options, max_extend_len=batch.max_extend_len, out=out[:, :4]))
    assert torch.equal(out[:, :4], expected)
    assert out[:, 4:].isnan().all()


def test_replays_in_a_graph():
    """Captured once, replayed over other queries and segments: the host must not read any of them."""
    shape = Shape(**CONFIGURATIONS["bf16"], bs=1, max_chunk_len=300)
    batch = random_batch(0, shape, [[("chunk", 2), ("new", 9), ("chunk", 2), ("new", 40)]])
    out = torch.full_like(batch.extend["q"], NAN)
    options = dict(batch.options, max_extend_len=49, out=out)
    module.link_extend(**packed(**batch.extend, **options))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.link_extend(**packed(**batch.extend, **options))
    for segments in ([300, 600], [123, 456], [200]):
        batch.extend["q"].normal_()
        batch.extend["num_segments"].fill_(len(segments))
        batch.extend["segment_ends"][0, : len(segments)] = torch.tensor(segments, dtype=torch.int32, device=DEVICE)
        graph.replay()
        exact = naive_link_extend(**batch.extend, **batch.options)[0]
        assert relative_error(out, exact) < 2e-2


def test_fp8_with_wide_heads_is_refused():
    batch = random_batch(0, Shape(dtype=torch.bfloat16, head_dim=256))
    with pytest.raises(ValueError, match="expected for torch.float8_e4m3fn caches head_dim 64 or 128, got 256"):
        run("extend", module, batch, **quantise(batch, torch.float8_e4m3fn))


@pytest.mark.parametrize("head_dim, rotary_dim, name", [(96, 96, "head_dim"), (128, 24, "rotary_dim")])
def test_unsupported_arguments_are_refused(head_dim, rotary_dim, name):
    batch = random_batch(0, Shape(dtype=torch.bfloat16, head_dim=head_dim, rotary_dim=rotary_dim))
    with pytest.raises(ValueError, match=f"link_extend: expected {name} to be "):
        run("extend", module, batch)

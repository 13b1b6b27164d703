"""link_decode in CUDA against the formula in fp64: the shapes of every implementation, shared chunks, every
schedule."""

import dataclasses
import importlib

import pytest
import torch
from cases import CASES, all_cases
from ragged import (
    DEVICE,
    NAN,
    Shape,
    add_sinks,
    cap,
    check,
    naive,
    packed,
    quantise,
    random_batch,
    relative_error,
    run,
    sizes,
)

if DEVICE != "cuda" or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
pytest.importorskip("flashinfer", reason="its JIT builds the CUDA modules")
module = importlib.import_module("sgl_kernel_lazy.cuda.link_decode")

CONFIGURATIONS = {
    "bf16": dict(dtype=torch.bfloat16, head_dim=128, rotary_dim=128, is_neox=True),
    "fp16, interleaved": dict(dtype=torch.float16, head_dim=128, rotary_dim=128, is_neox=False),
    "head_dim 64": dict(dtype=torch.bfloat16, head_dim=64, rotary_dim=64, is_neox=True),
    "partial": dict(dtype=torch.float16, head_dim=64, rotary_dim=48, is_neox=True),
    "head_dim 256": dict(dtype=torch.bfloat16, head_dim=256, rotary_dim=64, is_neox=True),
}
all_configurations = pytest.mark.parametrize("configuration", CONFIGURATIONS)
# Thresholds of saved reads for sharing a chunk: always, as served, never.
sharing = pytest.mark.parametrize("min_saved_tokens", [1, module.MIN_SAVED_TOKENS, 1 << 30])


def check_or_refuse(batch):
    if batch.shape.num_qo_heads // batch.shape.num_kv_heads <= (16 if batch.shape.head_dim == 256 else 32):
        check("decode", module, batch)
    else:
        with pytest.raises(ValueError, match="link_decode: expected at most .* query heads per kv head"):
            module.link_decode(**packed(**batch.decode, **batch.options))


@all_configurations
@all_cases
def test_link_decode(configuration, case):
    seed, shape, layout = CASES[case]
    check_or_refuse(random_batch(seed, dataclasses.replace(shape, **CONFIGURATIONS[configuration]), layout))


@all_configurations
@pytest.mark.parametrize("heads", [(8, 1), (32, 8)], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_sinks(configuration, heads, dtype):
    """Rows as long as a window, and one without KV tokens."""
    shape = Shape(*heads, **CONFIGURATIONS[configuration], bs=4)
    layout = [[("chunk", 2), ("text", 1), ("chunk", 2), ("new", 48)], [], [("new", 1)], [("text", 127), ("new", 1)]]
    batch = add_sinks(random_batch(0, shape, layout))
    batch.options["sinks"] = batch.options["sinks"].to(dtype or shape.dtype)
    check("decode", module, batch)


@all_configurations
@all_cases
def test_logit_caps(configuration, case):
    """Together with sinks, which are not capped."""
    seed, shape, layout = CASES[case]
    batch = random_batch(seed, dataclasses.replace(shape, **CONFIGURATIONS[configuration]), layout)
    check_or_refuse(cap(add_sinks(batch)))


@sharing
@all_configurations
@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (12, 4), (8, 2), (5, 5), (32, 32), (32, 1)], ids=str)
def test_many_users_of_few_chunks(monkeypatch, heads, configuration, min_saved_tokens):
    """Groups from two rows to several work items, over chunks from one token to many tiles."""
    monkeypatch.setattr(module, "MIN_SAVED_TOKENS", min_saved_tokens)
    shape = Shape(*heads, **CONFIGURATIONS[configuration], bs=40, max_segments=9, max_chunk_len=300, max_position=8192)
    check_or_refuse(random_batch(heads[0], shape))


@pytest.mark.parametrize("span", [1, 2, 5, 64])
@sharing
def test_any_span(monkeypatch, span, min_saved_tokens):
    """Spans start within and at the ends of runs and chunks, and hold several."""
    monkeypatch.setattr(module, "SPAN", span)
    monkeypatch.setattr(module, "MIN_SAVED_TOKENS", min_saved_tokens)
    shape = Shape(8, 2, **CONFIGURATIONS["bf16"], bs=7, max_segments=12, max_chunk_len=400, max_position=8192)
    check("decode", module, random_batch(span, shape))


def test_more_sharing_than_the_workspace_holds(monkeypatch):
    """A group without room in the workspace is read by each of its users."""
    monkeypatch.setattr(module, "MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr(module, "SPAN", 1)
    shape = Shape(8, 8, **CONFIGURATIONS["head_dim 64"], bs=96, max_segments=100, max_chunk_len=500, max_position=60000)
    layout = [[("chunk", i % 4) for i in range(100)] + [("new", 1)] for _ in range(96)]
    check("decode", module, random_batch(0, shape, layout))


def test_padding_rows_with_stale_segments(monkeypatch):
    """A padding row of a graph's batch has one KV token, and stale segments of the request that had the row before."""
    monkeypatch.setattr(module, "MIN_SAVED_TOKENS", 1)
    shape = Shape(8, 2, **CONFIGURATIONS["bf16"], bs=4, max_chunk_len=300)
    linked = [("chunk", 2), ("text", 3), ("chunk", 1), ("new", 2)]
    batch = random_batch(0, shape, [linked, [("new", 1)], linked, [("new", 1)]])
    exact, plain = naive("decode", batch, torch.float64)[0], naive("decode", batch, shape.dtype)[0]
    for name in ("num_segments", "segment_ends", "segment_offsets"):
        batch.extend[name] = batch.extend[name][[0, 0, 2, 0]]
    batch.segment_ids = batch.segment_ids[[0, 0, 2, 0]]
    # The padding's one KV token is the last of a chunk that the other rows share.
    chunk_end = batch.extend["segment_ends"][0, 0] - 1
    first = batch.extend["kv_indptr"][[1, 3]].long()
    batch.extend["kv_indices"][first] = batch.extend["kv_indices"][chunk_end].clone()
    out, _ = run("decode", module, batch)
    assert out.isfinite().all()
    assert relative_error(out[[0, 2]], exact[[0, 2]]) <= 2 * relative_error(plain[[0, 2]], exact[[0, 2]])


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("configuration", ["bf16", "fp16, interleaved", "head_dim 64"])
@pytest.mark.parametrize("heads", [(32, 8), (8, 4), (5, 5), (32, 1)], ids=str)
def test_fp8_caches(heads, configuration, fp8):
    """Against the formula on the dequantised values, within twice plain PyTorch's error on them."""
    shape = Shape(*heads, **CONFIGURATIONS[configuration], bs=20, max_segments=9, max_chunk_len=300, max_position=8192)
    batch = random_batch(heads[0], shape)
    quantised = quantise(batch, fp8, 2.0, 0.5)
    if shape.head_dim == 64 and heads[1] % 2:
        with pytest.raises(ValueError, match="link_decode: expected for torch.float8_e[45]m[23](fn)? caches"):
            run("decode", module, batch, **quantised)
    else:
        check("decode", module, batch, **quantised)


def test_chunks_that_differ_in_their_holes(monkeypatch):
    """Equal in length and in their first and last slot: only their ids tell them apart."""
    monkeypatch.setattr(module, "MIN_SAVED_TOKENS", 1)
    shape = Shape(8, 2, **CONFIGURATIONS["bf16"], bs=8, max_chunk_len=300)
    kept = [(0, *range(10 + b % 4, 250 + b % 4), 299) for b in range(8)]
    check("decode", module, random_batch(0, shape, [[("chunk", (2, kept[b])), ("new", 1)] for b in range(8)]))


def test_results_are_deterministic_without_sharing(monkeypatch):
    """Atomics decide where work is placed, but not what is added, nor in which order."""
    monkeypatch.setattr(module, "MIN_SAVED_TOKENS", 1 << 30)
    batch = random_batch(3, Shape(32, 8, **CONFIGURATIONS["bf16"], bs=40, max_chunk_len=300, max_position=8192))
    first = run("decode", module, batch)
    for _ in range(5):
        for one, other in zip(first, run("decode", module, batch), strict=True):
            assert torch.equal(one, other)


def test_a_workspace_serves_every_smaller_batch():
    batch = random_batch(6, Shape(**CONFIGURATIONS["bf16"]))
    dims = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), sizes(batch), strict=True))
    workspace = module.decode_workspace(64, 16, **dims, device=DEVICE).fill_(NAN)
    module.plan_decode(workspace, batch.decode_rows, **dims)
    out = module.link_decode(**packed(**batch.decode, **batch.options, workspace=workspace))
    assert torch.equal(out, run("decode", module, batch)[0])


def test_a_workspace_too_small_is_refused():
    batch = random_batch(6, Shape(**CONFIGURATIONS["bf16"]))
    dims = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), sizes(batch), strict=True))
    workspace = module.decode_workspace(1, 1, **dims, device=DEVICE)
    with pytest.raises(ValueError, match="workspace: expected at least"):
        module.plan_decode(workspace, batch.decode_rows, **dims)
    with pytest.raises(ValueError, match="workspace: expected at least"):
        module.link_decode(**packed(**batch.decode, **batch.options, workspace=workspace))


def test_graph_replay_follows_its_inputs():
    """A graph that includes the plan, captured over one batch, is right for another of the same shape."""
    shape = Shape(32, 8, **CONFIGURATIONS["bf16"], bs=6, max_segments=6, max_chunk_len=200)
    batches = [random_batch(seed, shape) for seed in range(3)]
    size = {k: [max(d) for d in zip(*(b.decode[k].shape for b in batches), strict=True)] for k in batches[0].decode}
    static = {
        k: t.new_zeros(size[k], dtype=torch.int32 if k == "kv_indices" else t.dtype)
        for k, t in batches[0].decode.items()
    }
    dims = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim"), sizes(batches[0]), strict=True))
    workspace = module.decode_workspace(6, static["segment_ends"].shape[1], **dims, device=DEVICE).fill_(NAN)
    options = dict(batches[0].options, workspace=workspace, out=torch.full_like(static["q"], NAN))
    segment_ids = torch.full_like(static["segment_ends"], -1)
    given = packed(**static, **options, segment_ids=segment_ids)

    def step():
        module.plan_decode(workspace, given["rows"], **dims)
        for _ in range(3):  # layers
            module.link_decode(**given)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        for key, tensor in batch.decode.items():
            static[key][tuple(slice(n) for n in tensor.shape)] = tensor
        segment_ids[:, : batch.segment_ids.shape[1]] = batch.segment_ids
        graph.replay()
        exact, plain = naive("decode", batch, torch.float64)[0], naive("decode", batch, shape.dtype)[0]
        assert relative_error(options["out"], exact) <= 2 * relative_error(plain, exact)

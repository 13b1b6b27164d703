"""Linked attention on FlashInfer's own kernels: on a GPU as they are, elsewhere its items and merge around a
stand-in."""

import dataclasses
import importlib
import math

import pytest
import torch
from cases import CASES, all_cases
from ragged import DEVICE, NAN, add_sinks, cap, check, naive, packed, random_batch, relative_error, run

pytest.importorskip("flashinfer")

from benchmark.kernels import flashinfer
from benchmark.kernels.flashinfer import common

ops = pytest.mark.parametrize("op", ["decode", "extend"])
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="FlashInfer's kernels need a GPU")
HALVES = [torch.float16, torch.bfloat16]
# A stand-in for the kernels can show how rows become items; head layouts are up to the kernels themselves.
LAYOUTS = [
    "ragged", "group of 7, interleaved", "many requests", "50 segments, spans between", "segments of one token",
    "same chunk twice", "plain requests", "plain beside linked", "empty rows", "offsets to the end",
    "chunked prefill goes on", "cached text behind new text", "chunks with holes", "behind a preamble",
    "nothing cached is seen",
]  # fmt: skip


class StandIn:
    """FlashInfer's interface in PyTorch: an item's rows over its slots, causally aligned at the end, with base-2
    lse."""

    def __init__(self, backend, q, num_kv_heads, qo_indptr, kv_indptr, *, causal, split=True):
        self.causal = causal

    def run(self, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, out, lse, sm_scale):
        group = q.shape[1] // k_cache.shape[1]
        for i in range(len(qo_indptr) - 1):
            rows = slice(int(qo_indptr[i]), int(qo_indptr[i + 1]))
            slots = kv_indices[int(kv_indptr[i]) : int(kv_indptr[i + 1])].long()
            num_rows, num_slots = rows.stop - rows.start, len(slots)
            if num_rows == 0 or num_slots == 0:
                continue  # what FlashInfer writes here must not matter
            keys, values = (c[slots].double().repeat_interleave(group, 1) for c in (k_cache, v_cache))
            scores = torch.einsum("qhd,khd->qhk", q[rows].double(), keys) * sm_scale
            if self.causal:
                seen = torch.ones(num_rows, num_slots, dtype=torch.bool).tril(num_slots - num_rows)
                scores.masked_fill_(~seen[:, None], -torch.inf)
            out[rows] = torch.einsum("qhk,khd->qhd", scores.softmax(-1), values).to(out.dtype)
            lse[rows] = (scores.logsumexp(-1) / math.log(2)).float()


@pytest.fixture
def stand_in(monkeypatch):
    for name in ("link_decode", "link_extend"):
        module = importlib.import_module(f"benchmark.kernels.flashinfer.{name}")
        monkeypatch.setattr(module, "Kernel", StandIn)
        monkeypatch.setattr(module, "check_supported", lambda *given: None)


@pytest.mark.slow
@ops
@pytest.mark.parametrize("case", LAYOUTS)
def test_items_and_merge(stand_in, op, case):
    """In float32, partial results are rounded once more, so the budget is a few roundings and not plain PyTorch's
    error."""
    if DEVICE != "cpu":
        pytest.skip("the kernels themselves run on a GPU")
    seed, shape, layout = CASES[case]
    one_group = dict(num_qo_heads=shape.num_qo_heads // shape.num_kv_heads, num_kv_heads=1)
    batch = random_batch(seed, dataclasses.replace(shape, **one_group), layout)
    out, lse = run(op, flashinfer, batch)
    exact, exact_lse = naive(op, batch, torch.float64)
    assert relative_error(out, exact) <= 1e-5
    assert torch.equal(lse == -torch.inf, exact_lse == -torch.inf)
    assert ((lse - exact_lse)[exact_lse != -torch.inf].abs() < 1e-5).all()


@on_gpu
@ops
@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
@all_cases
def test_cases(op, dtype, case):
    seed, shape, layout = CASES[case]
    if shape.head_dim not in common.HEAD_DIMS:
        pytest.skip(f"FlashInfer's kernels are compiled for head_dim {common.HEAD_DIMS}")
    check(op, flashinfer, random_batch(seed, dataclasses.replace(shape, dtype=dtype), layout))


@on_gpu
@ops
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head_dim, dtype", [(64, HALVES[1]), (128, HALVES[0]), (128, HALVES[1]), (256, HALVES[1])])
def test_long_rows(op, head_dim, dtype, seed):
    """Items long enough for FA3, where the GPU has it."""
    shape = dataclasses.replace(
        CASES["ragged"][1], num_qo_heads=32, num_kv_heads=8, head_dim=head_dim, rotary_dim=head_dim, dtype=dtype,
        max_chunk_len=700, max_segments=9, max_text_len=300, max_position=16384,
    )  # fmt: skip
    check(op, flashinfer, random_batch(seed, shape))


@on_gpu
def test_graph_replay_follows_the_plan():
    """A graph captured over one batch, replayed after planning others of its size, is right for those."""
    shape = dataclasses.replace(CASES["ragged"][1], bs=4, dtype=torch.bfloat16, max_segments=6)
    batches = [random_batch(seed, shape) for seed in range(3)]
    static = {}
    for key, tensor in batches[0].decode.items():
        size = [max(d) for d in zip(*(b.decode[key].shape for b in batches), strict=True)]
        static[key] = tensor.new_zeros(size, dtype=torch.int32 if key == "kv_indices" else tensor.dtype)
    sizes = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64)
    workspace = flashinfer.decode_workspace(max_bs=4, max_segments=8, **sizes, device=DEVICE)
    options = dict(batches[0].options, workspace=workspace, out=torch.full_like(static["q"], NAN))
    given = packed(**static, **options)
    flashinfer.plan_decode(workspace, given["rows"], **sizes)
    flashinfer.link_decode(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.link_decode(**given)
    for batch in batches:
        for key, tensor in batch.decode.items():
            static[key][tuple(slice(n) for n in tensor.shape)] = tensor
        flashinfer.plan_decode(workspace, given["rows"], **sizes)
        graph.replay()
        exact, plain = naive("decode", batch, torch.float64)[0], naive("decode", batch, shape.dtype)[0]
        assert relative_error(options["out"], exact) <= 2 * relative_error(plain, exact)


@ops
def test_an_unsupported_type_is_named(op):
    with pytest.raises(
        ValueError, match=f"^link_{op}: expected queries in torch.float16 or torch.bfloat16, got torch.float32"
    ):
        run(op, flashinfer, random_batch(0))


@ops
@pytest.mark.parametrize("change", [add_sinks, cap])
def test_sinks_and_caps_are_refused(op, change):
    batch = change(random_batch(0, dataclasses.replace(CASES["ragged"][1], dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match=f"^link_{op}: expected neither windows nor sinks nor logit caps"):
        run(op, flashinfer, batch)

"""Which prefill batches run without SGLang's padded CUDA graph, and which split their attention in two."""

import contextlib
from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel

from sglang_lazy.attention.rows import LinkedBatch, Pass
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.chunks.counts import Counts
from sglang_lazy.core.fills import Fill
from sglang_lazy.core.keys import ChunkKey, Namespace
from sglang_lazy.core.model import AttentionLayer, ServedModel
from sglang_lazy.core.prompt import ChunkSlice
from sglang_lazy.port.model import model_runner as hooks
from sglang_lazy.port.model.model_runner import can_run_prefill_graph

LARGE, SMALL = 4096, 2048  # hidden sizes of 8B and 1B models

MODEL = ServedModel({}, {0: AttentionLayer(1, 1, 2, SimpleNamespace(cos_sin_cache=torch.zeros(64, 2)))})


def runs_graph(
    num_tokens,
    hidden_size=LARGE,
    tp_size=1,
    chunks=True,
    sglang=True,
    last_layer=None,
    recurrent=None,
    backend="breakable",
):
    pool = SimpleNamespace(segment_table=SegmentTable(1, 1, "cpu", model=MODEL))
    pool.segment_table.recurrent = recurrent
    runner = SimpleNamespace(
        req_to_token_pool=pool,
        model_config=SimpleNamespace(hidden_size=hidden_size),
        device="cuda",
    )
    graph_runner = SimpleNamespace(
        model_runner=runner,
        capture_num_tokens=[1024, 1536, 1792, 2048, 2304, 8192],
        prefill_backend_name=backend,
    )
    forward_batch = SimpleNamespace(input_ids=torch.zeros(num_tokens))

    running = pool.segment_table.running(None, last_layer=last_layer) if chunks else contextlib.nullcontext()
    with running, get_parallel().override(tp_size=tp_size):
        return can_run_prefill_graph(lambda *given: sglang, graph_runner, forward_batch)


def test_a_large_batch_with_chunks_is_not_padded():
    assert not runs_graph(2080)
    assert not runs_graph(5000)
    assert not runs_graph(1568)  # it would be padded to 1,792


def test_a_batch_of_a_graphs_size_uses_the_graph():
    assert runs_graph(2048)


@pytest.mark.parametrize(
    "small", [dict(num_tokens=900), dict(num_tokens=1500), dict(hidden_size=SMALL), dict(tp_size=4)]
)
def test_short_passes_run_graphs_despite_padding(small):
    assert runs_graph(**{"num_tokens": 2080, **small})


def test_a_pass_that_ends_early_runs_no_graph():
    """A graph would run all layers."""
    assert not runs_graph(2048, last_layer=1) and not runs_graph(900, last_layer=0)


def test_recurrent_layers_are_outside_of_graphs_or_there_is_none():
    """A graph would show them the batch of its capture. In one that torch.compile has split, they are not known to be
    outside."""
    outside, inside = SimpleNamespace(breaks_graphs=True), SimpleNamespace(breaks_graphs=False)
    assert runs_graph(2048, recurrent=outside) and runs_graph(900, recurrent=outside)
    assert not runs_graph(2080, recurrent=outside), "other reasons hold for them, too"
    assert not runs_graph(2048, recurrent=inside) and not runs_graph(900, recurrent=inside)
    assert not runs_graph(2048, recurrent=outside, backend="tc_piecewise")
    assert runs_graph(2048, backend="tc_piecewise") and runs_graph(2048, recurrent=inside, chunks=False)


def test_batches_without_chunks_are_left_to_sglang():
    assert runs_graph(2080, chunks=False)
    assert not runs_graph(2048, sglang=False)


@pytest.mark.parametrize("device, num_tokens, apart", [("cuda", 2080, False), ("cuda", 3104, True), ("cpu", 5, True)])
def test_small_batches_take_one_attention_kernel(monkeypatch, device, num_tokens, apart):
    """With more kernels, launching would take the host longer than the device."""
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(segment_table=SegmentTable(1, 1, "cpu", model=MODEL), size=7),
        model_config=SimpleNamespace(hidden_size=LARGE),
        device=device,
    )
    batch = SimpleNamespace(
        reqs=[SimpleNamespace(lazy=Fill([], None))],
        forward_mode=ForwardMode.EXTEND,
        extend_num_tokens=num_tokens,
        prefix_lens=[0],
        extend_lens=[num_tokens],
        req_to_token_pool=runner.req_to_token_pool,
        chunked_req=None,
        tree_cache=SimpleNamespace(
            rows=None,
            store=SimpleNamespace(counts=Counts()),
            admission=SimpleNamespace(producer=SimpleNamespace(before_forward=lambda: None)),
        ),
    )
    asked = []
    monkeypatch.setattr(LinkedBatch, "of", lambda *given, windows: asked.append((*given, windows)))
    with get_parallel().override(tp_size=1):
        hooks.forward_batch_generation(lambda *given: None, SimpleNamespace(model_runner=runner), batch)
    assert asked == [(Pass([batch.reqs[0].lazy], [0], [num_tokens]), apart, 7, False)]


def test_plain_decode_is_recognised_at_once():
    """Requests are examined only if a row of the batch has chunks."""
    table = SegmentTable(2, 1, "cpu", model=MODEL)
    batch = SimpleNamespace(reqs=[SimpleNamespace(lazy=Fill([], None))], forward_mode=ForwardMode.DECODE)
    assert not hooks.involves_chunks(batch, table)
    key = ChunkKey(b"", Namespace("chunk", None, None), b"")
    table.assign({1: [ChunkSlice(key, 0, array("q"), 0, 3, ((0, 3),))]}, {1: [0]}, {})
    assert hooks.involves_chunks(batch, table)
    table.assign({1: ()}, {}, {})
    assert not hooks.involves_chunks(batch, table)
    batch.forward_mode = ForwardMode.EXTEND
    assert hooks.involves_chunks(batch, table), "fills count too, though their rows have no segments"

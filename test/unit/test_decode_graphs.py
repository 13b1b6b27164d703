"""Decode graphs for linked rows: which are captured and replayed, and where they store keys of window layers."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_utils.capture_mode import _set_capture_attention_variant

from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.attention.table import SegmentTable
from sglang_lazy.core.model import AttentionLayer, LayerRope, ServedModel
from sglang_lazy.port.graphs import add_variants, batch_of_graph
from sglang_lazy.port.model.attention import LinkAttention

pytestmark = pytest.mark.usefixtures("sglang_context")

MAX_BS = 16


class StockBackend(AttentionBackend):
    prepared = 0

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pass

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        self.prepared += 1

    init_forward_metadata_in_graph = init_forward_metadata_out_graph


class LinkedBackend(LinkAttention, StockBackend):
    """As `with_link_path` makes it, of which only the window slots are real."""

    def __init__(self, slots):
        self.link_table = SimpleNamespace(current=LinkedBatch(), batch_type=LinkedBatch)
        self.link_model = SimpleNamespace(window_slots=slots)
        self.link_decode = SimpleNamespace(allocate_for_graphs=lambda max_rows: None, of=lambda batch, for_graph: {})
        self.init_cuda_graph_state(MAX_BS, MAX_BS)


@pytest.fixture
def capturing():
    """As SGLang captures a graph for linked rows, and runs it once before."""
    _set_capture_attention_variant("link")
    yield
    _set_capture_attention_variant(None)


def decode_batch(slots):
    """A `ForwardBatch`; nothing reads its rows here.  slots: of its new tokens."""
    rows = dict.fromkeys(("req_pool_indices", "seq_lens", "seq_lens_cpu"))
    return SimpleNamespace(out_cache_loc=slots, forward_mode=ForwardMode.DECODE, batch_size=len(slots), **rows)


def test_padding_writes_nowhere(capturing):
    """A graph of eight rows is replayed for six, then for five. It stores the keys of all its rows: those of padding in
    slot 0, which no request owns. Where such a row wrote in an earlier batch, there is a token that is still read."""
    slots = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(99, generator=torch.manual_seed(0)) + 1])
    backend = LinkedBackend(slots)
    buffers = build_decode_registry(
        device=torch.device("cpu"),
        max_bs=MAX_BS,
        max_num_token=MAX_BS,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        share_pool=False,
    )
    captured = decode_batch(buffers.get_slot("out_cache_loc").buffer[:8])
    for tokens in ([11, 25, 31, 42, 53, 68], [12, 26, 43, 54, 69], [13], [14, 27, 44]):
        batch = SimpleNamespace(out_cache_loc=torch.tensor(tokens))
        buffers.fill_from(
            batch, raw_bs=len(tokens), padded_bs=8, raw_num_tokens=len(tokens), padded_num_tokens=8,
            skip_slots=frozenset(buffers.slot_names()) - {"out_cache_loc"},
        )  # fmt: skip
        backend.init_forward_metadata_in_graph(captured)  # what a replay repeats
        assert backend.link_window_slots.tolist() == slots[tokens].tolist() + [0] * (8 - len(tokens))


def test_a_graph_for_linked_rows_prepares_its_batch_itself(capturing):
    """So the host has nothing to do before a replay, and SGLang's own preparation is for graphs without them."""
    backend, batch = LinkedBackend(torch.zeros(1, dtype=torch.int64)), decode_batch(torch.zeros(1, dtype=int))
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert backend.link_planned is None
    backend.init_forward_metadata_in_graph(batch)
    assert backend.link_planned == {}
    backend.init_forward_metadata_out_graph(batch)
    assert backend.prepared == 0
    backend.link_table.current = None
    backend.init_forward_metadata_out_graph(batch)
    _set_capture_attention_variant("stock")
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    assert backend.prepared == 3 and backend.link_planned is None


def table():
    rope = LayerRope(torch.zeros(1), 8, True, "cpu")
    return SegmentTable(1, 1, "cpu", ServedModel({}, {0: AttentionLayer(1, 1, 2, rope)}))


def captures(segment_table, drafts=False):
    """What SGLang's loop captures for one size, without LoRA: the labels of variants, and the batch that a backend sees
    in each.  drafts: whether the model drafts."""
    seen = []
    graph_runner = SimpleNamespace(
        model_runner=SimpleNamespace(
            is_draft_worker=drafts,
            device="cpu",
            gpu_id=0,
            model=torch.nn.Module(),
            req_to_token_pool=SimpleNamespace(segment_table=segment_table),
        ),
        capture_bs=[1],
        compile_bs=[],
        captured_req_width=1,
        record_nolora_graph=False,
        attention_graph_variants=None,
        _set_profile_trace_tag=lambda *_: None,
        capture_one_shape=lambda *given: seen.append(
            (given[-1], segment_table and batch_of_graph(segment_table, in_capture=True))
        ),
    )
    add_variants(graph_runner)
    DecodeCudaGraphRunner._capture_one_stream(graph_runner)
    return graph_runner, seen


def test_each_shape_is_captured_for_linked_rows_too():
    given = table()
    graph_runner, seen = captures(given)
    assert seen == [("stock", None), ("link", LinkedBatch())]
    resolve = DecodeCudaGraphRunner._resolve_attention_variant
    assert resolve(graph_runner, None, 1) == "stock"
    with given.running(LinkedBatch()):
        assert resolve(graph_runner, None, 1) == "link"
        assert batch_of_graph(given, in_capture=False) == LinkedBatch()


def test_models_without_chunk_reuse_have_the_stock_graphs():
    graph_runner, seen = captures(None)
    assert seen == [(None, None)] and graph_runner.attention_graph_variants is None


def test_models_that_draft_have_the_stock_graphs():
    graph_runner, seen = captures(table(), drafts=True)
    assert seen == [(None, None)] and graph_runner.attention_graph_variants is None

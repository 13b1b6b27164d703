"""Where decode graphs store keys if layers with windows have a pool of their own."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_lazy.attention.rows import LinkedBatch
from sglang_lazy.port.model.attention import LinkAttention

pytestmark = pytest.mark.usefixtures("sglang_context")

MAX_BS = 16


class StockBackend(AttentionBackend):
    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        pass


class LinkedBackend(LinkAttention, StockBackend):
    """As `with_link_path` makes it, of which only the window slots are real."""

    def __init__(self, slots):
        self.link_table = SimpleNamespace(current=LinkedBatch(), ends=torch.empty(0))
        self.link_model = SimpleNamespace(window_slots=slots.__getitem__)
        self.link_decode = SimpleNamespace(allocate_for_graphs=lambda max_bs: None, of=lambda batch, for_graph: {})
        self.init_cuda_graph_state(MAX_BS, MAX_BS)


def test_padding_writes_nowhere():
    """SGLang replays a graph of eight rows for six, then for five. Its batch lists the slots of real tokens only, but
    the graph stores the keys of all its rows: those of padding in slot 0, which no request owns. Where such a row wrote
    in an earlier batch, there is a token that is still read."""
    slots = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(99, generator=torch.manual_seed(0)) + 1])
    backend = LinkedBackend(slots)

    def prepare(tokens):
        backend.init_forward_metadata_out_graph(SimpleNamespace(out_cache_loc=torch.tensor(tokens)))

    prepare([0] * 8)
    captured = backend.link_window_slots  # what the graph reads in every replay
    for tokens in ([11, 25, 31, 42, 53, 68], [12, 26, 43, 54, 69], [13], [14, 27, 44]):
        prepare(tokens)
        assert captured.tolist() == slots[tokens].tolist() + [0] * (8 - len(tokens))

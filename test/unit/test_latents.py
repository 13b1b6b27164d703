"""Attention over latents that are not rotated: what SGLang's own is shown of a pass with chunks, and how it reads."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

from sglang_lazy.attention.rows import AttentionRow
from sglang_lazy.attention.unrotated import UnrotatedBatch
from sglang_lazy.port.model.latents import LatentAttention


class Stock(AttentionBackend):
    """In place of SGLang's attention: notes the rows that it reads, and in which order it is called."""

    def __init__(self):
        self.calls = []

    def rows_of(self, batch):
        rows = self.link_rows.req_to_token[batch.req_pool_indices.long()]
        return [row[:n].tolist() for row, n in zip(rows, batch.seq_lens.tolist(), strict=True)]

    def init_forward_metadata(self, batch):
        self.calls.append(("prepared", self.rows_of(batch)))

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **kwargs):
        self.calls.append(("read", self.rows_of(batch), save_kv_cache, kwargs))
        return q


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.setattr(AttentionBackendRegistry, "_handlers", {"fa3": lambda *_: "expanded"})
    backend = type("Latents", (LatentAttention, Stock), {})()
    table = SimpleNamespace(current=None, has_chunks=False, loads=None)
    table.loads = SimpleNamespace(wait=lambda layer: backend.calls.append(("waited", layer)))
    rows = SimpleNamespace(req_to_token=torch.arange(100, 140, dtype=torch.int32).view(2, 20))
    backend.init_link_path(SimpleNamespace(req_to_token_pool=rows, prefill_attention_backend_str="fa3"), table, None)
    return backend


def batch(*lens):
    """Of requests whose rows have so many tokens, two of them new."""
    lens = torch.tensor(lens)
    return SimpleNamespace(
        batch_size=len(lens), seq_lens=lens, seq_lens_cpu=lens, req_pool_indices=torch.arange(len(lens)),
        extend_prefix_lens=lens - 2, extend_seq_lens=torch.full_like(lens, 2),
    )  # fmt: skip


def test_pieces_are_rows_in_a_pass_with_chunks(attention):
    """Two new tokens, of which the first does not see what the second sees; the pool's own rows are there again."""
    positions, own = torch.arange(8).numpy(), attention.link_rows.req_to_token.clone()
    pieces = [((0, 2), (4, 5)), ((0, 4), (5, 6))]
    rows = [AttentionRow(0, ranges, positions[: sum(b - a for a, b in ranges)], 1, True) for ranges in pieces]
    attention.link_table.current, attention.link_table.has_chunks = UnrotatedBatch(rows), True
    attention.init_forward_metadata(batch(6))
    seen = [[100, 101, 104], [100, 101, 102, 103, 105]]
    q = torch.ones(2, 3)
    assert attention.forward_extend(q, q, q, SimpleNamespace(layer_id=3), batch(6), k_rope="rope") is q
    assert attention.calls == [("prepared", seen), ("waited", 3), ("read", seen, True, {"k_rope": "rope"})]
    assert torch.equal(attention.link_rows.req_to_token, own)


def test_other_passes_have_the_rows_that_sglang_knows(attention):
    attention.init_forward_metadata(given := batch(6, 3))
    attention.forward_extend(torch.ones(1), None, None, SimpleNamespace(layer_id=3), given, save_kv_cache=False)
    rows = [[*range(100, 106)], [*range(120, 123)]]
    assert attention.calls == [("prepared", rows), ("read", rows, False, {})]


def test_passes_with_chunks_read_latents_as_they_are(attention):
    """Other ways expand what the rows that SGLang knows have cached."""
    method = AttentionBackendRegistry.get_handler("fa3")
    assert method(None, None) == "expanded"
    attention.link_table.has_chunks = True
    assert method(None, None) is AttnForwardMethod.MLA

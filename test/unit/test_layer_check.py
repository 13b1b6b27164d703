"""The start-up check tells models that leave rotated queries and keys as they are from those that change them."""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sglang_lazy.port.model.layers import check_layers, describe_layers, layer_rope

pytestmark = pytest.mark.usefixtures("sglang_context")

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 32


class Attention(torch.nn.Module):
    """Projects, rotates, and then applies `after` to q and k."""

    def __init__(self, is_neox, rotary_dim, after, layer_id=0, **more):
        super().__init__()
        self.proj = torch.nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.rotary_emb = RotaryEmbedding(HEAD_DIM, rotary_dim, 2048, 10000, is_neox, torch.float32)
        self.attn = RadixAttention(HEADS, HEAD_DIM, 1.0, KV_HEADS, layer_id)
        self.after = after
        self.more = more

    def forward(self, positions, hidden_states, forward_batch):
        sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        q, k, v = self.proj(hidden_states).split(sizes, dim=-1)
        q, k = self.rotary_emb.forward_native(positions, q.contiguous(), k.contiguous())
        return self.attn(self.after(q, positions), self.after(k, positions), v, forward_batch, **self.more)


class AttentionOfOtherNames(Attention):
    """As in Phi: other argument names, in another order."""

    def forward(self, position_ids, forward_batch, hidden_states):
        return super().forward(position_ids, hidden_states, forward_batch)


class DecoderLayer(Attention):
    """As in Qwen3.5 and Falcon-H1: a whole decoder layer has the attention, in a method of its own."""

    def self_attention(self, positions, hidden_states, forward_batch):
        return super().forward(positions, hidden_states, forward_batch)

    def forward(self, positions, hidden_states, forward_batch, residual):
        raise NotImplementedError("norms and more, which the check does not need")


class WithoutPositions(Attention):
    """As in Granite 4 and Nemotron-H: no rotation, and no positions."""

    def __init__(self, after):
        super().__init__(True, HEAD_DIM, after)
        self.rotary_emb = None

    def forward(self, hidden_states, forward_batch):
        q, k, v = self.proj(hidden_states).split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM], dim=-1)
        return self.attn(self.after(q, None), k, v, forward_batch)


def unchanged(x, _positions):
    return x


def check_all(*layers):
    model = torch.nn.ModuleList(layers)
    return check_layers(model, describe_layers(model, 2048, "cpu"), HIDDEN, torch.float32)


def test_a_decoder_layer():
    check_all(DecoderLayer(True, HEAD_DIM, unchanged))
    with pytest.raises(ValueError, match="DecoderLayer of layer 0: rotating a query or key back"):
        check_all(DecoderLayer(True, HEAD_DIM, lambda x, positions: x * (1 + positions[:, None])))


def test_a_layer_without_a_rotation():
    """Its queries are not rotated back, either; and one whose queries differ by row in another way is found."""
    (layer,) = check_all(WithoutPositions(unchanged)).values()
    assert (layer.rope.cos_sin_cache[1000] == layer.rope.cos_sin_cache[0]).all()
    rows = torch.arange(4.0)[:, None]
    with pytest.raises(ValueError, match="WithoutPositions of layer 0: rotating a query or key back"):
        check_all(WithoutPositions(lambda x, _: x * (1 + rows[: len(x)])))


def check(after, is_neox=True, rotary_dim=HEAD_DIM):
    torch.manual_seed(0)
    check_all(Attention(is_neox, rotary_dim, after))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_a_model_that_leaves_the_rotation_alone(is_neox, rotary_dim):
    """Both ways of pairing dimensions, full and partial rotation."""
    check(unchanged, is_neox, rotary_dim)


class Reader(Attention):
    """As Gemma 4's last layers, it reads the keys and values of the layer whose id it has."""

    def forward(self, positions, hidden_states, forward_batch):
        q = self.proj(hidden_states)[:, : HEADS * HEAD_DIM].contiguous()
        q, _ = self.rotary_emb.forward_native(positions, q, torch.zeros_like(q))
        return self.attn(self.after(q, positions), None, None, forward_batch, save_kv_cache=False)


def test_a_layer_that_reads_the_keys_of_another():
    """It counts as one layer with that one unless they differ; its queries are checked."""
    torch.manual_seed(0)
    own, reader = (kind(True, HEAD_DIM, unchanged) for kind in (Attention, Reader))
    reader.rotary_emb = own.rotary_emb
    assert list(check_all(own, reader)) == [0]
    reader.after = lambda x, positions: x * (1 + positions[:, None])
    with pytest.raises(ValueError, match="Reader of layer 0: rotating a query or key back"):
        check_all(own, reader)
    reader.after = unchanged
    reader.attn.sliding_window_size = 7
    with pytest.raises(ValueError, match="layers that read the KV of layer 0 differ"):
        check_all(own, reader)


def test_a_norm_after_the_rotation():
    """A weight per dimension does not commute with the rotation."""
    weight = torch.linspace(0.5, 1.5, HEAD_DIM)
    with pytest.raises(ValueError, match="Attention of layer 0: rotating a query or key back"):
        check(lambda x, _: (x.view(len(x), -1, HEAD_DIM) * weight).flatten(1))


def test_a_scale_that_depends_on_the_position():
    """The factor on a query must be the same at every position."""
    with pytest.raises(ValueError, match="relative error"):
        check(lambda x, positions: x * (1 + positions[:, None] / 1000))


def test_a_scale_that_changes_at_the_end_of_the_context():
    """The probe looks at the end of the context, too."""
    with pytest.raises(ValueError, match="position 2047"):
        check(lambda x, positions: x * (1 + 0.1 * (positions[:, None] > 2000)))


class Unrotated(Attention):
    def forward(self, positions, hidden_states, forward_batch):
        return super().forward(positions * 0, hidden_states, forward_batch)


@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2])
def test_layers_without_rotation(rotary_dim):
    """As every fourth layer of some models: there is no rotation to undo."""
    kinds = Attention, Unrotated
    layers = check_all(*(kind(True, rotary_dim, unchanged, layer_id=i) for i, kind in enumerate(kinds)))
    rotated, still = (layer.rope.cos_sin_cache for layer in layers.values())
    cos, sin = still.chunk(2, dim=1)
    assert (cos == 1).all() and (sin == 0).all()
    assert rotated.shape == still.shape and not torch.equal(rotated, still)


def test_every_layer_is_probed():
    """One unrotated layer has queries that grow with the position."""
    grown = Unrotated(True, HEAD_DIM, lambda x, positions: x * torch.arange(1, len(x) + 1)[:, None], layer_id=1)
    with pytest.raises(ValueError, match="Unrotated of layer 1"):
        check_all(Attention(True, HEAD_DIM, unchanged), grown)


def test_other_names_of_arguments():
    check_all(AttentionOfOtherNames(True, HEAD_DIM, unchanged))


def test_unknown_arguments_of_attention():
    """An argument unknown to the link path would be missing from answers over chunks."""
    with pytest.raises(ValueError, match="attention takes bias"):
        check_all(Attention(True, HEAD_DIM, unchanged, bias=torch.zeros(HEADS)))
    check_all(Attention(True, HEAD_DIM, unchanged, bias=None))


def test_layers_with_sinks_and_windows():
    """SGLang's models count a window without the token itself, and pass sinks with every call."""
    layers = [
        Attention(True, HEAD_DIM, unchanged, i, sinks=given) for i, given in enumerate([None, torch.zeros(HEADS)])
    ]
    layers[1].attn.sliding_window_size = 127
    checked = check_all(*layers)
    assert [layer.sinks for layer in checked.values()] == [False, True]
    assert [layer.window for layer in checked.values()] == [None, 128]


def test_a_layer_that_cannot_be_run():
    """Instead of the layer's own error, the server reports what it cannot serve."""
    with pytest.raises(ValueError, match="Attention of layer 0 cannot be checked: no such kernel"):
        check(lambda *_: (_ for _ in ()).throw(RuntimeError("no such kernel")))


@pytest.mark.parametrize("context_len", [1, 100, 511, 512, 1023, 2048])
def test_angles_of_a_short_context(context_len):
    """Our table has rows for negative positions, which the model's lacks."""
    rope = RotaryEmbedding(HEAD_DIM, HEAD_DIM, 2048, 10000, True, torch.float32)
    expected = rope._compute_cos_sin_cache()[:context_len]
    # In float32, angles of up to 2,048 radians are off by about 1e-4.
    assert torch.allclose(layer_rope(rope, context_len, "cpu").cos_sin_cache[:context_len], expected, atol=1e-3)


def test_angles_that_are_not_position_times_frequency():
    """The table is compared with the model's own."""
    rope = RotaryEmbedding(HEAD_DIM, HEAD_DIM, 2048, 10000, True, torch.float32)
    rope._compute_cos_sin_cache = lambda: torch.rand(2048, HEAD_DIM)
    with pytest.raises(ValueError, match="angles"):
        layer_rope(rope, 2048, "cpu")

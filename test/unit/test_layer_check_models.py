"""The start-up check on SGLang's own attention layers, of models that no CPU can serve."""

import pytest
import torch
import transformers
from sglang.srt import runtime_context
from sglang.srt.models import bailing_moe, gemma3_causal, hunyuan, minimax_m2
from torch.nn.functional import rms_norm

from oracle.models import MODELS
from sglang_lazy.port.model.layers import check_layers, describe_layers

HIDDEN = 128


@pytest.fixture(autouse=True)
def one_rank(sglang_context):
    one = runtime_context.get_parallel().override(attn_dp_size=1, attn_tp_rank=0, attn_tp_size=1)
    with one, torch.compiler.set_stance("force_eager"):  # compilation would take half a minute
        yield


def check(layer):
    """Probe the layer with random weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.uniform_(0.5, 1.5, generator=generator) if weight.dim() == 1 else weight.normal_(generator=generator)
    model = torch.nn.ModuleList([layer])
    check_layers(model, describe_layers(model, 2048, "cpu"), HIDDEN, torch.float32)


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_gemma3(factor):
    """Each layer is given its angles; in larger models the angles of layers without a window are scaled."""
    config = MODELS["gemma3"].config()
    config.rope_parameters["full_attention"] |= {"rope_type": "linear", "factor": factor}
    model = gemma3_causal.Gemma3TextModel(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(generator=generator)
    layers = describe_layers(model, 2048, "cpu")
    assert [layer.window for layer in layers.values()] == [32, 32, None, 32]
    check_layers(model, layers, HIDDEN, torch.float32)
    for layer, (base, scale) in zip(layers.values(), [(100, 1), (100, 1), (10000, factor), (100, 1)], strict=True):
        angles = 7 * base ** (-torch.arange(0, 48, 2) / 48) / scale
        assert torch.allclose(layer.rope.cos_sin_cache[7], torch.cat([angles.cos(), angles.sin()]), atol=1e-5)
    # Each kind of layer fails with the other kind's rotation.
    layers[0], layers[2] = layers[2], layers[0]
    with pytest.raises(ValueError, match="Gemma3Attention of layer 0: rotating a query or key back"):
        check_layers(model, layers, HIDDEN, torch.float32)


def test_minimax_m2(monkeypatch):
    """Its norm over all heads exists only for GPUs and some CPUs."""

    def over_all_heads(norm, q, k):
        return [rms_norm(x, x.shape[-1:], own.weight, norm._eps) for x, own in ((q, norm._q_norm), (k, norm._k_norm))]

    monkeypatch.setattr(minimax_m2.MiniMaxM2QKRMSNorm, "forward", over_all_heads)
    layer = minimax_m2.MiniMaxM2Attention(MODELS["minimax-m2"].config())
    assert layer.rotary_emb.rotary_dim == 64 and layer.use_qk_norm
    check(layer)


@pytest.mark.parametrize("partial", [0.5, 1.0])
@pytest.mark.parametrize("use_qk_norm", [True, False])
def test_bailing_moe(partial, use_qk_norm):
    """Ling 1 and 2; transformers has no such model."""
    config = transformers.PretrainedConfig(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=32, use_qk_norm=use_qk_norm,
        use_bias=False, use_qkv_bias=False, rms_norm_eps=1e-6, max_position_embeddings=2048,
        partial_rotary_factor=partial, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    check(bailing_moe.BailingMoEAttention(config))


@pytest.mark.parametrize("use_qk_norm", [True, False])
def test_hunyuan(use_qk_norm):
    """Its norms follow the rotation."""
    config = transformers.PretrainedConfig(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2, head_dim=32, use_qk_norm=use_qk_norm,
        rms_norm_eps=1e-6,
    )  # fmt: skip
    layer = hunyuan.HunYuanAttention(config, HIDDEN, 4, 2, layer_id=0)
    if not use_qk_norm:
        return check(layer)
    with pytest.raises(ValueError, match="HunYuanAttention of layer 0: rotating a query or key back"):
        check(layer)

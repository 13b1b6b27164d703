"""A Comb model on SGLang's layers: configuration, weights, the encoder, and which tokens its cross layers change."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt import runtime_context

from oracle.comb import CROSS, KV_HEADS, LAYERS, CombOracle, build
from research.quality.comb import Comb, save_comb
from research.quality.llama import Llama, Shape
from sgl_kernel_lazy import torch_impl
from sglang_lazy.comb.config import CombLlamaConfig
from sglang_lazy.comb.cross import Readers
from sglang_lazy.comb.encoder_rows import EncoderRows
from sglang_lazy.core.model import LayerRope


@pytest.fixture(autouse=True)
def one_rank(sglang_context):
    with runtime_context.get_parallel().override(attn_dp_size=1, attn_tp_rank=0, attn_tp_size=1, tp_rank=0, tp_size=1):
        yield


def new_model(path):
    from sglang_lazy.port.comb.llama import CombLlamaForConditionalGeneration

    return CombLlamaForConditionalGeneration(CombLlamaConfig.from_pretrained(path))


def rows(lens, causal):
    return EncoderRows(lens, causal, torch_impl, LayerRope(torch.zeros(16), 1, True, "cpu"))


@pytest.mark.parametrize("causal", [False, True])
def test_the_encoder(tmp_path, causal):
    """Chunks of many lengths encoded in one batch, with normalised keys, against the oracle, which encodes them one by
    one."""
    path = build(tmp_path / "model", causal=causal)
    model, oracle = new_model(path), CombOracle(path)
    model.load_weights(load_file(path / "model.safetensors").items())
    chunks = [[5, 6, 7], [9], list(range(20, 60)), [7, 6, 5, 5]]
    ids = torch.tensor([token for chunk in chunks for token in chunk])
    found = list(model.encode(ids, rows([len(chunk) for chunk in chunks], causal)))
    expected = [oracle._encode(chunk) for chunk in chunks]
    assert len(found) == len(CROSS)
    for place, pair in enumerate(found):
        for part, values in enumerate(pair):
            wanted = torch.cat([layers[place][part].transpose(0, 1) for layers in expected])
            assert values.shape == (len(ids), KV_HEADS, 32)
            assert (values - wanted).abs().max() < 1e-5


def test_each_rank_has_the_heads_that_its_queries_read(tmp_path):
    """Four ranks share two KV heads. Given all KV heads, each rank's weights equal the matching slices of the whole."""
    path = build(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    for rank in range(4):
        sizes = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), 4)
        groups = dict.fromkeys(
            ("tp_group", "attn_tp_group"), SimpleNamespace(world_size=4, rank_in_group=rank, cpu_group=None)
        )
        with runtime_context.get_parallel().override(tp_rank=rank, attn_tp_rank=rank, **sizes, **groups):
            model = new_model(path)
            model.load_weights(weights.items())
        parts, group = dict(model.named_parameters()), rank * KV_HEADS // 4
        for i in range(len(CROSS)):
            for name in (f"chunk_model.k_proj.{i}.weight", f"chunk_model.v_proj.{i}.weight"):
                assert torch.equal(parts[name], weights[name].unflatten(0, (KV_HEADS, 32))[group])
            name = f"language_model.model.cross_layers.{i}.cross_attn"
            own = slice(rank * 32, rank * 32 + 32)  # each rank has one query head
            assert torch.equal(parts[f"{name}.q_proj.weight"], weights[f"{name}.q_proj.weight"][own])
            assert torch.equal(parts[f"{name}.o_proj.weight"], weights[f"{name}.o_proj.weight"][:, own])
            assert torch.equal(parts[f"{name}.k_norm.weight"], weights[f"{name}.k_norm.weight"])
            attention = model.chunk_model.layers[i].self_attn.attn
            assert (attention.num_heads, attention.num_kv_heads) == (1, 1)


def test_public_configurations_count_both_kinds_of_layers(tmp_path):
    config = CombLlamaConfig.from_pretrained(build(tmp_path / "model"))
    assert (config.num_hidden_layers, config.cross_attention_layers) == (LAYERS, list(CROSS))
    assert config.architectures == ["CombLlamaForConditionalGeneration"] and config.head_dim == 32
    assert not hasattr(config, "text_config")  # with it, SGLang would treat the model as multimodal
    config.save_pretrained(tmp_path / "again")
    assert CombLlamaConfig.from_pretrained(tmp_path / "again").num_hidden_layers == LAYERS


def test_bad_checkpoints(tmp_path):
    path = build(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    gate = "language_model.model.cross_layers.1.cross_attn_mlp_gate"
    for changed, message in [
        ({name: w for name, w in weights.items() if name != gate}, f"has no weight '{gate}'"),
        ({**weights, "chunk_model.norm.weight": weights[gate]}, "'chunk_model.norm.weight' is not one of"),
        ({**weights, "vision.weight": weights[gate]}, "'vision.weight' is not one of"),
        ({**weights, "chunk_model.embed_tokens.weight": -weights["chunk_model.embed_tokens.weight"]}, "embedding"),
    ]:
        with pytest.raises(ValueError, match=message):
            new_model(path).load_weights(changed.items())
    model = new_model(path)
    model.load_weights(weights.items())
    model.load_weights([(gate, weights[gate] + 1)])  # as in an update of a running server's weights
    assert torch.equal(model.language_model.model.cross_layers[1].cross_attn_mlp_gate, weights[gate] + 1)


@pytest.mark.parametrize("places", [[], [1, 0], [0, 5], [2, 2]])
def test_bad_positions_of_cross_layers(tmp_path, places):
    path = build(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = LAYERS + len(places)
    (path / "config.json").write_text(json.dumps({**config, "cross_attention_layers": places}))
    with pytest.raises(ValueError, match="cross_attention_layers"):
        new_model(path)


def test_what_training_saves_is_served(tmp_path):
    """Names and shapes as training saves them, and the same keys and values."""
    shape = Shape(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    decoder, comb = Llama(shape), Comb(shape, [1, 3])
    save_comb(decoder, comb, tmp_path, torch.float32, {"bos_token_id": 0, "eos_token_id": 1})
    model = new_model(tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    model.load_weights(pair for file in files for pair in load_file(file).items())
    ids, mask = torch.tensor([[3, 4, 5, 6, 7]]), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    expected = comb.encode(decoder, ids, torch.arange(5)[None], mask)
    for (key, value), (k, v) in zip(expected, model.encode(ids[0], rows([5], False)), strict=True):
        assert (key[0].transpose(0, 1) - k).abs().max() < 1e-5
        assert (value[0].transpose(0, 1) - v).abs().max() < 1e-5


@pytest.mark.parametrize("first_layer", [False, True])
@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_tokens_without_chunks_keep_their_bits(mode, first_layer):
    """SGLang adds hidden state and residual before it rounds: both stay as they were for tokens without chunks, and
    others get what the cross layer computed."""
    generator = torch.Generator().manual_seed(0)
    hidden, residual = torch.randn(2, 6, 8, generator=generator).bfloat16()
    residual = None if first_layer else residual
    states = hidden if first_layer else hidden + residual
    readers = [1, 3, 4]
    row_lens = torch.tensor([0, 4, 0, 5, 2, 0]) if mode == "decode" else None
    found = Readers(torch.tensor(readers) if mode == "prefill" else None, row_lens)
    changed, rest = found.replace(states, lambda x: x * 3 + 1, hidden, residual)
    others = [0, 2, 5]
    assert torch.equal(changed[others], hidden[others])
    assert rest is None if first_layer else torch.equal(rest[others], residual[others])
    total = changed if first_layer else changed + rest
    assert torch.equal(total[readers], (states * 3 + 1)[readers])

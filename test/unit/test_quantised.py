"""The checkpoints that GPU tests serve, read back by other libraries."""

import copy
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition
from sglang.srt import runtime_context
from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS, moe_wna16, mxfp4
from sglang.srt.layers.quantization.utils import pack_rows
from triton_kernels.numerics_details.mxfp import upcast_from_mxfp_torch
from triton_kernels.tensor_details import layout

from oracle.block_mask import load_model
from oracle.models.build import build_model
from oracle.quantised import FORMATS, GROUP, WITH_EXPERTS, awq, fp8_blocks, gptq, int4_groups, quantised, round_inputs
from sglang_lazy.port.cache.storage import model_identity

PROJECTIONS = ("gate_up_proj", "down_proj")
METHODS = {**BASE_QUANTIZATION_METHODS, "mxfp4": mxfp4.Mxfp4Config}  # which SGLang lists only where it runs
WEIGHT = torch.randn(2 * GROUP, 3 * GROUP, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["compressed fp8", "compressed int8", "compressed int4"])
def test_transformers_reads_compressed_tensors(model_dir, tmp_path, name):
    stored, read = quantised(build_model(FORMATS[name].model, model_dir), name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    model(torch.tensor([[1]]))  # decompresses the weights
    theirs = dict(model.named_parameters())
    for key, weight in load_model(read, torch.float32, "cpu").named_parameters():
        torch.testing.assert_close(theirs[key], weight, rtol=1e-6, atol=1e-7)


def test_sglang_reads_awq():
    stored, read = awq(WEIGHT)
    theirs = awq_dequantize_decomposition(stored["qweight"], stored["scales"].float(), stored["qzeros"])
    assert torch.equal(theirs, read.T)


def test_gptq_is_packed_as_sglang_packs():
    stored, read = gptq(WEIGHT)
    numbers, scale, _ = int4_groups(WEIGHT)
    assert torch.equal(stored["qweight"], pack_rows(numbers.T.int(), 4, *WEIGHT.T.shape))
    assert torch.equal(stored["qzeros"], torch.full_like(stored["qzeros"], 0x77777777))
    zeros = (stored["qzeros"][0, 0].item() & 15) + 1
    groups = stored["g_idx"].long()
    assert torch.equal((numbers.T - zeros) * stored["scales"].float()[groups], read.T)


@pytest.mark.parametrize("store", [form.store for name, form in FORMATS.items() if name != "bitsandbytes"])
def test_weights_lose_little(store):
    _, read = store(WEIGHT)
    assert read.shape == WEIGHT.shape and (read - WEIGHT).norm() < 0.15 * WEIGHT.norm()


def test_blocks_have_their_own_scales():
    scaled = WEIGHT.clone()
    scaled[GROUP:, :GROUP] *= 1000
    (stored, read), (plain, _) = fp8_blocks(scaled), fp8_blocks(WEIGHT)
    ratio = stored["weight_scale_inv"] / plain["weight_scale_inv"]
    assert torch.allclose(ratio, torch.tensor([[1.0, 1, 1], [1000, 1, 1]]))
    assert (read[GROUP:, :GROUP] - scaled[GROUP:, :GROUP]).norm() < 0.1 * scaled[GROUP:, :GROUP].norm()


@pytest.fixture
def load(sglang_context, model_dir, tmp_path, monkeypatch):
    """load(format): the tensors of a checkpoint; SGLang's model with them, before they are laid out for kernels; and
    the weights of the equivalent model."""
    for module in (torch.cuda, moe_wna16):
        monkeypatch.setattr(module, "get_device_capability", lambda: (9, 0))
    for name in ("gptq.check_marlin_supported", "schemes.gptq_marlin.verify_marlin_supported"):
        monkeypatch.setattr(f"sglang.srt.layers.quantization.gptq.{name}", lambda *_, **__: True)

    def load(name):
        form = FORMATS[name]
        stored, read = quantised(build_model(form.model, model_dir), name, tmp_path)
        tensors, config = load_file(Path(stored) / "model.safetensors"), transformers.AutoConfig.from_pretrained(stored)
        module = importlib.import_module(f"sglang.srt.models.{config.model_type}")
        one_rank = dict(tp_size=1, attn_tp_rank=0, attn_tp_size=1, attn_cp_rank=0, attn_dp_size=1)
        one_rank |= dict(moe_ep_rank=0, moe_ep_size=1, moe_tp_rank=0, moe_tp_size=1)
        group = runtime_context.get_parallel().tp_group
        one_rank |= dict(moe_dp_group=group, moe_ep_group=group, moe_tp_group=group)
        with runtime_context.get_parallel().override(**one_rank):
            kind = form.config["quant_method"]
            method = METHODS["moe_wna16" if kind in ("awq", "gptq") else kind].from_config(form.config)
            model = getattr(module, config.architectures[0])(config, method)
            model.load_weights(tensors.items())
        return tensors, model, dict(load_model(read, torch.float32, "cpu").named_parameters())

    return load


def test_block_scales_reach_sglangs_layers(load):
    """Otherwise outputs are NaN: SGLang presets scales to the lowest float and merely warns of names it does not
    know."""
    tensors, model, _ = load("fp8 block")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    scales = {name: scale for name, scale in model.named_parameters() if name.endswith("weight_scale_inv")}
    assert len(scales) == 4 * FORMATS["fp8 block"].model.settings["num_hidden_layers"]
    for name, scale in scales.items():
        layer = name.split(".")[-2]
        stored_scales = [tensors[name.replace(layer, part)] for part in parts.get(layer, (layer,))]
        assert torch.equal(scale, torch.cat(stored_scales)), name


def halves(stored: torch.Tensor, dim: int) -> torch.Tensor:
    """Two numbers from 0 to 15 for each byte, the lower first."""
    return torch.stack([stored & 15, stored >> 4], dim + 1).flatten(dim, dim + 1).float()


def dequantised(experts: dict[str, torch.Tensor], part: str) -> torch.Tensor:
    """The weights of SGLang's experts, [experts, out, in].  part: `w13` or `w2`."""
    if f"{part}_weight_packed" in experts:
        packed = experts[f"{part}_weight_packed"]  # [experts, in / 8, out]
        numbers = (packed[:, :, None] >> 4 * torch.arange(8)[:, None]) & 15
        return ((numbers.flatten(1, 2) - 8) * experts[f"{part}_weight_scale"].repeat_interleave(GROUP, 1)).mT
    if f"{part}_qweight" in experts:  # two numbers a byte, [experts, out, in / 2]
        numbers = halves(experts[f"{part}_qweight"], 2).unflatten(2, (-1, GROUP))
        stored = experts[f"{part}_qzeros"]  # [experts, out / 2, groups]; empty where 8 always stands for zero
        zeros = halves(stored, 1)[..., None] if stored.numel() else 8
        return ((numbers - zeros) * experts[f"{part}_scales"][..., None]).flatten(2)
    weight, scale = experts[f"{part}_weight"], experts.get(f"{part}_weight_scale")
    if weight.dtype == torch.uint8:
        return upcast_from_mxfp_torch(weight, scale, torch.float32, -1)
    if scale is None:
        scale = experts[f"{part}_weight_scale_inv"].repeat_interleave(GROUP, 1).repeat_interleave(GROUP, 2)
    return weight.float() * scale


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_reach_sglangs_layers(load, name):
    _, model, theirs = load(name)
    layers = [module for key, module in model.named_modules() if key.endswith(".experts")]
    assert layers
    pairs = [[weight for key, weight in theirs.items() if key.endswith(f"experts.{part}")] for part in PROJECTIONS]
    for layer, *weights in zip(layers, *pairs, strict=True):
        experts = dict(layer.named_parameters())
        for part, expected in zip(("w13", "w2"), weights, strict=True):
            expected = expected.mT if name == "mxfp4 gpt-oss" else expected
            torch.testing.assert_close(dequantised(experts, part), expected, rtol=1e-6, atol=1e-7)


def test_transformers_reads_mxfp4(model_dir, tmp_path):
    name = "mxfp4 gpt-oss"
    stored, read = quantised(build_model(FORMATS[name].model, model_dir), name, tmp_path)
    config = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32, quantization_config=config)
    theirs = dict(model.named_parameters())
    for key, weight in load_model(read, torch.float32, "cpu").named_parameters():
        assert torch.equal(theirs[key].float(), weight), key


@pytest.mark.parametrize("capability", [8, 9])
def test_mxfp4_experts_are_part_of_the_identity(load, monkeypatch, capability):
    """As `triton_kernels` lays them out for a GPU, where they are no parameters."""
    monkeypatch.setattr(layout, "cuda_capability_geq", lambda major, minor=0: capability >= major)
    _, loaded, _ = load("mxfp4 gpt-oss")

    def identity(changed=None):
        mlp = copy.deepcopy(loaded.model.layers[1].mlp)
        if changed:
            mlp.experts.get_parameter(changed)[2, 5, 3] ^= 1
        mlp.experts.quant_method.use_triton_kernels = True
        mlp.experts.quant_method.process_weights_after_loading(mlp.experts)
        assert "experts.w13_weight" not in dict(mlp.named_parameters())
        return model_identity(
            SimpleNamespace(
                model=mlp,
                model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict)),
                kv_cache_dtype="bf16",
                ps=SimpleNamespace(tp_rank=0, tp_size=1),
            )
        )

    parts = [f"{part}_weight{kind}" for part in ("w13", "w2") for kind in ("", "_scale")]
    assert identity() == identity()
    assert len({identity(), *map(identity, parts)}) == 1 + len(parts)


@pytest.mark.parametrize("name", [name for name, form in WITH_EXPERTS.items() if form.rounded])
def test_inputs_of_experts_are_rounded(model_dir, tmp_path, name):
    """Before both of their projections."""
    _, read = quantised(build_model(FORMATS[name].model, model_dir), name, tmp_path)
    model = load_model(read, torch.float32, "cpu")
    experts = [module for key, module in model.named_modules() if key.endswith(".experts")][-1]
    x = torch.randn(7, experts.gate_up_proj.shape[-1], generator=torch.Generator().manual_seed(0))
    chosen, shares = torch.tensor([[1, 3]]).expand(7, 2), torch.tensor([[0.25, 0.75]]).expand(7, 2)
    rounded, expected = FORMATS[name].rounded, 0
    for expert, share in ((1, 0.25), (3, 0.75)):
        gate, up = torch.nn.functional.linear(rounded(x), experts.gate_up_proj[expert]).chunk(2, -1)
        gated = torch.nn.functional.silu(gate) * up
        expected += share * torch.nn.functional.linear(rounded(gated), experts.down_proj[expert])
    round_inputs(model, name)
    torch.testing.assert_close(experts(x, chosen, shares), expected)

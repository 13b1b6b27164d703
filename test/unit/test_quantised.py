"""The checkpoints that GPU tests serve, read back by other libraries."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from sglang.kernels.ops.quantization.awq_triton import awq_dequantize_decomposition
from sglang.srt import runtime_context
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.quantization.utils import pack_rows

from oracle.block_mask import load_model
from oracle.models.build import build_model
from oracle.quantised import FORMATS, GROUP, awq, fp8_blocks, gptq, int4_groups, quantised

WEIGHT = torch.randn(2 * GROUP, 3 * GROUP, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("compressed")])
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


def test_block_scales_reach_sglangs_layers(sglang_context, model_dir, tmp_path, monkeypatch):
    """Otherwise outputs are NaN: SGLang presets scales to the lowest float and merely warns of names it does not
    know."""
    form = FORMATS["fp8 block"]
    stored, _ = quantised(build_model(form.model, model_dir), "fp8 block", tmp_path)
    weights, config = load_file(Path(stored) / "model.safetensors"), transformers.AutoConfig.from_pretrained(stored)
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
    for name in ("_PP", "_MOE_DP"):
        monkeypatch.setattr(parallel_state, name, group)
    one_rank = dict(tp_size=1, attn_tp_rank=0, attn_tp_size=1, attn_cp_rank=0, attn_dp_size=1)
    module = importlib.import_module(f"sglang.srt.models.{config.model_type}")
    with runtime_context.get_parallel().override(**one_rank):
        model = getattr(module, config.architectures[0])(config, Fp8Config.from_config(form.config))
    model.load_weights(weights.items())
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    scales = {name: scale for name, scale in model.named_parameters() if name.endswith("weight_scale_inv")}
    assert len(scales) == 4 * config.num_hidden_layers
    for name, scale in scales.items():
        layer = name.split(".")[-2]
        stored_scales = [weights[name.replace(layer, part)] for part in parts.get(layer, (layer,))]
        assert torch.equal(scale, torch.cat(stored_scales)), name

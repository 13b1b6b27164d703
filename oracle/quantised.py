"""Quantised checkpoints of tiny models, and the equivalent models: with dequantised weights, and with inputs rounded
where kernels for the format round them."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .models import MODELS
from .models.spec import ModelSpec

# The smallest sizes for which all formats have kernels
SIZES = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _of_size(name: str, **sizes) -> ModelSpec:
    """A model of the tables in another size."""
    spec = MODELS[name]
    return dataclasses.replace(spec, name=f"{name}-quantisable", settings={**spec.settings, **sizes})


LLAMA = ModelSpec("llama-quantisable", "LlamaConfig", {**SIZES, "rope_parameters": ROPE})
QWEN3 = ModelSpec("qwen3-quantisable", "Qwen3Config", {**SIZES, "rope_parameters": ROPE})
QWEN3_MOE = _of_size("qwen3-moe", **SIZES, moe_intermediate_size=256)
GLM4_MOE = _of_size("glm4-moe", **SIZES, moe_intermediate_size=256)
MINIMAX_M2 = _of_size("minimax-m2", **{**SIZES, "intermediate_size": 256})
# Like the released models' 2880, these are multiples of 64, but not of 128.
GPT_OSS = _of_size("gpt-oss", hidden_size=320, intermediate_size=320, head_dim=64)

GROUP = 128  # weights, or elements of a layer's input, that share a scale
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by code; eight more codes are their negatives
FP4_BLOCK = 32

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A weight, [out, in] unless other axes are named, as tensors of a checkpoint, by suffix; and dequantised."""


@dataclasses.dataclass(frozen=True)
class Format:
    """config: `quantization_config` of the model.
    store: writes a weight, fp32.
    rounded: rounds a layer's input, [..., in], like its kernel; None if kernels do not round it.
    model: the quantised model.
    weights: the names of its quantised weights end like this.
    """

    config: dict
    store: Callable[[torch.Tensor], Stored]
    rounded: Callable[[torch.Tensor], torch.Tensor] | None = None
    model: ModelSpec = LLAMA
    weights: str = r"(_proj|\.w[123])\.weight"


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def fp8_input(x: torch.Tensor, group: int) -> torch.Tensor:
    """group: how many elements share a scale."""
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / FP8_MAX
    return (to_fp8(groups, scale).float() * scale).flatten(-2).to(x.dtype)


def int8_input(x: torch.Tensor) -> torch.Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
    return ((x.float() / scale).round() * scale).to(x.dtype)


def fp8_blocks(weight: torch.Tensor) -> Stored:
    """One scale for each square of `GROUP` rows and columns."""
    squares = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))  # [rows, GROUP, columns, GROUP]
    scale = squares.abs().amax((1, 3), keepdim=True) / FP8_MAX
    stored = to_fp8(squares, scale)
    tensors = {"weight": stored.reshape(weight.shape), "weight_scale_inv": scale[:, 0, :, 0]}
    return tensors, (stored.float() * scale).reshape(weight.shape)


def fp8_tensor(weight: torch.Tensor) -> Stored:
    scale = weight.abs().max() / FP8_MAX
    stored = to_fp8(weight, scale)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def fp8_rows(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    stored = to_fp8(weight, scale)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


def int8_rows(weight: torch.Tensor) -> Stored:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round()
    return {"weight": stored.to(torch.int8), "weight_scale": scale}, stored * scale


def packed(x: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack each eight adjacent numbers from 0 to 15 in the last dimension into one int32."""
    x = x.long().unflatten(-1, (-1, 8))
    return sum(x[..., place] << 4 * i for i, place in enumerate(order)).to(torch.int32)


def int4_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers from 0 to 15 with 8 for zero, [out, in]; scales, [out, in / GROUP]; the dequantised weight."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()  # servers keep scales in bf16
    stored = (groups / scale).round().clamp(-8, 7)
    return (stored + 8).flatten(1), scale[..., 0], (stored * scale).flatten(1)


def compressed_int4(weight: torch.Tensor) -> Stored:
    stored, scale, read = int4_groups(weight)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": packed(stored), "weight_scale": scale.bfloat16(), "weight_shape": shape}, read


def gptq(weight: torch.Tensor) -> Stored:
    stored, scale, read = int4_groups(weight)
    tensors = {
        "qweight": packed(stored).T.contiguous(),
        "qzeros": packed(torch.full_like(scale.T, 7)),  # one less than what stands for zero
        "scales": scale.T.bfloat16().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return tensors, read


def awq(weight: torch.Tensor) -> Stored:
    """Each group has its own zero point."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    stored = (groups / scale + zero).round().clamp(0, 15)
    tensors = {
        "qweight": packed(stored.flatten(1).T, AWQ_ORDER),
        "qzeros": packed(zero[..., 0].T, AWQ_ORDER),
        "scales": scale[..., 0].T.bfloat16().contiguous(),
    }
    return tensors, ((stored - zero) * scale).flatten(1)


def bitsandbytes(weight: torch.Tensor) -> Stored:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight, state = quantize_4bit(weight.bfloat16().contiguous(), quant_type="nf4", compress_statistics=True)
    parts = {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}
    return {"weight": weight, **parts}, dequantize_4bit(weight, state)


def mxfp4(weight: torch.Tensor) -> Stored:
    """The experts of gpt-oss, [experts, in, out]: each 32 elements of the input share a power of two."""
    blocks = weight.mT.contiguous().unflatten(-1, (-1, FP4_BLOCK))
    exponent = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2  # the largest number is 1.5 * 2 ** 2
    scaled = blocks / 2**exponent
    code = torch.bucketize(scaled.abs(), (FP4[1:] + FP4[:-1]) / 2)
    read = FP4[code].copysign(scaled) * 2**exponent
    code += 8 * (scaled < 0)
    tensors = {
        "_blocks": (code[..., ::2] + 16 * code[..., 1::2]).to(torch.uint8),
        "_scales": (exponent[..., 0] + 127).to(torch.uint8),
    }
    return tensors, read.flatten(-2).mT


def _compressed(kind: str, bits: int, weights: dict, inputs: dict | None) -> dict:
    """A configuration of `compressed-tensors`."""
    common = {"num_bits": bits, "type": "float" if kind == "float-quantized" else "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": inputs and {**common, "dynamic": True, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_BY_ROW, _BY_TOKEN = {"strategy": "channel"}, {"strategy": "token"}
_INT4 = {"bits": 4, "group_size": GROUP}
FORMATS = {
    # SGLang's Llama treats `weight_scale_inv` as an alias of `weight_scale`, and leaves blocks without scales.
    "fp8 block": Format(
        {**_FP8, "weight_block_size": [GROUP, GROUP]}, fp8_blocks, lambda x: fp8_input(x, GROUP), QWEN3
    ),
    "fp8 tensor": Format(_FP8, fp8_tensor, lambda x: fp8_input(x, x.shape[-1])),
    "compressed fp8": Format(
        _compressed("float-quantized", 8, _BY_ROW, _BY_TOKEN), fp8_rows, lambda x: fp8_input(x, x.shape[-1])
    ),
    "compressed int8": Format(_compressed("int-quantized", 8, _BY_ROW, _BY_TOKEN), int8_rows, int8_input),
    "compressed int4": Format(
        _compressed("pack-quantized", 4, {"strategy": "group", "group_size": GROUP}, None), compressed_int4
    ),
    "awq": Format({"quant_method": "awq", **_INT4, "zero_point": True, "version": "gemm"}, awq),
    "bitsandbytes": Format(
        {
            **{"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            **{"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"},
        },
        bitsandbytes,
    ),
    "gptq": Format({"quant_method": "gptq", **_INT4, "desc_act": False, "sym": True, "lm_head": False}, gptq),
}
_MODELS_WITH_EXPERTS = {
    "fp8 block": [QWEN3_MOE, MINIMAX_M2],
    "compressed fp8": [GLM4_MOE],
    "compressed int4": [QWEN3_MOE],
    "awq": [QWEN3_MOE],
    "gptq": [QWEN3_MOE],
}
WITH_EXPERTS = {
    "mxfp4 gpt-oss": Format({"quant_method": "mxfp4"}, mxfp4, model=GPT_OSS, weights=r"experts\.\w+_proj"),
    **{
        f"{name} {model.name.removesuffix('-quantisable')}": dataclasses.replace(FORMATS[name], model=model)
        for name, models in _MODELS_WITH_EXPERTS.items()
        for model in models
    },
}
FORMATS |= WITH_EXPERTS


def quantised(model: str, name: str, path: Path, kv_scales: tuple[float, float] | None = None) -> tuple[str, str]:
    """Folders of two models: one with weights in a format of `FORMATS`, and its equivalent.

    kv_scales: scales of keys and values for an fp8 cache, written for each layer.
    """
    form, folders = FORMATS[name], [path / "stored", path / "read"]
    tensors: list[dict[str, torch.Tensor]] = [{}, {}]
    for key, weight in load_file(Path(model) / "model.safetensors").items():
        stored, read = {key: weight}, weight
        if re.search(f"{form.weights}$", key):
            by_suffix, read = form.store(weight.float())
            stored = {key.removesuffix("weight") + suffix: one.contiguous() for suffix, one in by_suffix.items()}
            if kv_scales and key.endswith("k_proj.weight"):
                attention = key.removesuffix("k_proj.weight")
                stored |= {attention + f"{one}_scale": torch.tensor(s) for one, s in zip("kv", kv_scales, strict=True)}
        tensors[0].update(stored)
        tensors[1][key] = read.contiguous()
    for folder, content in zip(folders, tensors, strict=True):
        shutil.copytree(model, folder)
        save_file(content, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folders[0] / "config.json").read_text())
    # SGLang computes gpt-oss in the dtype that is named here, whatever --dtype says.
    (folders[0] / "config.json").write_text(
        json.dumps({**config, "dtype": "bfloat16", "quantization_config": form.config})
    )
    return str(folders[0]), str(folders[1])


def round_inputs(model: torch.nn.Module, name: str) -> None:
    """Make the projections of a Hugging Face model round their inputs as a format's kernels do."""
    rounded = FORMATS[name].rounded
    if rounded is None:
        return
    for key, module in model.named_modules():
        experts = hasattr(module, "_apply_gate")
        if experts or key.endswith("_proj"):
            module.register_forward_pre_hook(lambda _module, inputs: (rounded(inputs[0]), *inputs[1:]))
        if experts:  # what they compute between their projections
            module._apply_gate = lambda x, gated=module._apply_gate: rounded(gated(x))

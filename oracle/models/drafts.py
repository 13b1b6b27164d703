"""Drafts for speculative decoding with a tiny model: models that guess its next tokens."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from .build import init_weight
from .folders import made_once
from .spec import rope

Weights = dict[str, torch.Tensor]


def build_draft(algorithm: str, target: str, cache_dir: str | Path) -> str:
    """The folder of a draft under `cache_dir`, made if it is not there.

    algorithm: STANDALONE: the target with weights that differ a little, so that some guesses are right; EAGLE and
        EAGLE3: heads with seeded weights, whose guesses are hardly ever right; NEXTN: the target with a layer more,
        which guesses as badly, as released checkpoints have it; FROZEN_KV_MTP: an assistant that reads the target's KV.
    target: the folder of a Llama, as `build_model` makes it; for EAGLE3 also of a GPT-OSS, for NEXTN of a GLM-4.5 or
        a Qwen3.5, for FROZEN_KV_MTP of a Gemma 4.
    """
    digest = hashlib.sha256(f"{Path(__file__).read_text()}{Path(target).name}".encode()).hexdigest()[:12]

    def write(folder: Path) -> None:
        shutil.copytree(target, folder, dirs_exist_ok=True)  # for its tokenizer
        config = json.loads(Path(target, "config.json").read_text())
        config, weights = DRAFTS[algorithm](config, target)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return made_once(Path(cache_dir) / f"draft-{algorithm.lower()}-{digest}", write)


def _standalone(config: dict, target: str) -> tuple[dict, Weights]:
    weights, generator = load_file(Path(target, "model.safetensors")), torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if "layers." in name and weight.dim() == 2:
            noise = torch.empty_like(weight).normal_(0, 1, generator=generator)
            weight += 0.03 * weight.std() * noise
    return config, weights


def _layer(config: dict, prefix: str, num_inputs: int, generator: torch.Generator) -> Weights:
    """A Llama's layer whose attention reads `num_inputs` features."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    shapes = {
        "self_attn.q_proj": (config["num_attention_heads"] * dim, num_inputs),
        "self_attn.k_proj": (config["num_key_value_heads"] * dim, num_inputs),
        "self_attn.v_proj": (config["num_key_value_heads"] * dim, num_inputs),
        "self_attn.o_proj": (hidden, config["num_attention_heads"] * dim),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    weights = {f"{prefix}{name}.weight": _random(*shape, generator=generator) for name, shape in shapes.items()}
    return weights | {f"{prefix}post_attention_layernorm.weight": torch.ones(hidden)}


def _random(outputs: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    return torch.empty(outputs, inputs).normal_(0, inputs**-0.5, generator=generator)


def _eagle(config: dict, _target: str) -> tuple[dict, Weights]:
    config = config.get("text_config", config)
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(1)
    weights = _layer(config, "layers.0.", hidden, generator)
    weights["fc.weight"] = _random(hidden, 2 * hidden, generator)
    weights["fc.bias"] = torch.zeros(hidden)
    return {**config, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}, weights


def _eagle3(config: dict, _target: str) -> tuple[dict, Weights]:
    """It guesses the even tokens only, and sees what the first three layers of the target read. Whatever the target
    is, this is a Llama, with a rotation of its own."""
    config = config.get("text_config", config)
    hidden, vocabulary, generator = config["hidden_size"], config["vocab_size"], torch.Generator().manual_seed(2)
    guessed = torch.arange(vocabulary) % 2 == 0
    num_guessed = int(guessed.sum())
    weights = _layer(config, "midlayer.", 2 * hidden, generator)
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    weights["fc.weight"] = _random(hidden, 3 * hidden, generator)
    weights["lm_head.weight"] = _random(num_guessed, hidden, generator)
    weights["t2d"], weights["d2t"] = guessed, torch.arange(num_guessed)  # token 2 i is i tokens further
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "attention_bias": False,
        "rope_parameters": rope(),
        "num_hidden_layers": 1,
        "draft_vocab_size": num_guessed,
        "num_aux_hidden_states": 3,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1], "use_aux_hidden_state": True},
    }
    config = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    return {**config, **settings}, weights


def _nextn(config: dict, target: str) -> tuple[dict, Weights]:
    """The last layer again, over the hidden states and the next tokens."""
    weights, generator = load_file(Path(target, "model.safetensors")), torch.Generator().manual_seed(3)
    text = config.get("text_config", config)
    hidden, num_layers = text["hidden_size"], text["num_hidden_layers"]
    if text["model_type"] == "glm4_moe":
        own = layer = f"model.layers.{num_layers}."
        joined, norms, scale = "eh_proj", ("enorm", "hnorm", "shared_head.norm"), torch.ones(hidden)
        text["num_nextn_predict_layers"] = 1
    else:  # Qwen3.5, which adds one to the weights of norms
        own, layer = "mtp.", "mtp.layers.0."
        joined, norms, scale = "fc", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), torch.zeros(hidden)
        text["mtp_num_hidden_layers"] = 1
    added = {f"{own}{name}.weight": scale.clone() for name in norms}
    added[f"{own}{joined}.weight"] = _random(hidden, 2 * hidden, generator)
    for name, weight in weights.items():
        _, of_last, rest = name.partition(f".layers.{num_layers - 1}.")
        if of_last:
            added[layer + rest] = weight.clone()
    return config, {**weights, **added}


def _frozen_kv_mtp(config: dict, _target: str) -> tuple[dict, Weights]:
    """A Gemma 4's assistant: narrower layers of both kinds, two of them with windows. They have queries alone."""
    text, generator = config["text_config"], torch.Generator().manual_seed(4)
    whole = text["per_layer_config"][str(text["layer_types"].index("full_attention"))]
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    settings = {
        **{key: value for key, value in text.items() if key not in ("model_type", "per_layer_config")},
        **dict(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_kv_shared_layers=3, layer_types=kinds),
        **dict(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0),
        **dict(use_double_wide_mlp=False, enable_moe_block=False),
        **dict(global_head_dim=whole["head_dim"], num_global_key_value_heads=whole["num_key_value_heads"]),
    }
    assistant = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**settings),
        backbone_hidden_size=text["hidden_size"],
        tie_word_embeddings=True,
    )
    model = transformers.Gemma4AssistantForCausalLM(assistant)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            init_weight(name, weight, generator, tied=True)
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    return {**assistant.to_dict(), "architectures": ["Gemma4AssistantForCausalLM"]}, weights


DRAFTS: dict[str, Callable[[dict, str], tuple[dict, Weights]]] = {
    "STANDALONE": _standalone,
    "EAGLE": _eagle,
    "EAGLE3": _eagle3,
    "NEXTN": _nextn,
    "FROZEN_KV_MTP": _frozen_kv_mtp,
}

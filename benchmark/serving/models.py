"""Models to serve by name: real shapes with random weights, and the tiny model for machines without a GPU."""

import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmark.kv_bytes import kv_bytes_per_token
from benchmark.sample import load_sample
from sglang_lazy.testing import device_options
from sglang_lazy.testing.tiny_model import VOCAB_SIZE as TOKENIZER_VOCAB
from sglang_lazy.testing.tiny_model import all_texts, tiny_model, train_tokenizer

LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_5 = {
    "attn_output_gate": True,
    "bos_token_id": None,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
}
"""What hybrids of this family share: their text parts, since a benchmark has no images."""
ONE_OF_FOUR = [*["linear_attention"] * 3, "full_attention"]
QWEN3_5_4B = {
    **QWEN3_5,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "layer_types": ONE_OF_FOUR * 8,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
QWEN3_6_35B_A3B = {
    **QWEN3_5,
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "layer_types": ONE_OF_FOUR * 10,
    "moe_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
DENSE = {"llama-3.1-8b": LLAMA_3_1_8B, "qwen3-8b": QWEN3_8B}
"""Those whose layers all have attention."""
SHAPES = {**DENSE, "qwen3.5-4b": QWEN3_5_4B, "qwen3.6-35b-a3b": QWEN3_6_35B_A3B}
TINY = "tiny"
TRAINED_TOKENS = {"kvlink": {"link": [16, 17, 18, 19, 20]}, "packet": {"before": [21, 22], "behind": [23, 24]}}
"""Arbitrary ids: only their number affects the time."""
ORDINARY_TOKENS = range(16, TOKENIZER_VOCAB)
"""Token ids that every model here has, excluding special ones."""


DRAFT_VOCAB = 32000
DRAFT_FOLDER = "draft"


def draft_of(shape: dict) -> dict:
    """The shape of an EAGLE3 head: a Llama's layer as wide as the model's, which guesses 32,000 tokens."""
    head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
    }
    return {**shape, **head}


def build_model(directory: Path, shape: dict) -> Path:
    """A directory that SGLang can serve with `--load-format dummy`: the real shape, no weights, and a draft if it is
    dense."""
    if shape in DENSE.values():
        (directory / DRAFT_FOLDER).mkdir()
        (directory / DRAFT_FOLDER / "config.json").write_text(json.dumps(draft_of(shape), indent=2))
    (directory / "config.json").write_text(json.dumps(shape, indent=2))
    (directory / "lazy_tokens.json").write_text(json.dumps(TRAINED_TOKENS))
    train_tokenizer(all_texts(load_sample())).save_pretrained(directory)
    return directory


def model_name(name: str) -> str:
    """`name`, if it can be a model. Raises ValueError for a misspelt shape."""
    if name not in (*SHAPES, TINY) and "/" not in name:
        raise ValueError(f"unknown model {name!r}: expected one of {', '.join([*SHAPES, TINY])}, a path or a hub name")
    return name


def model_path(model: str, scratch: Path) -> str:
    """Where SGLang finds `model`: a name in SHAPES (built in `scratch`), "tiny", or a path or hub name, unchanged."""
    if model == TINY:
        return str(tiny_model(all_texts(load_sample())))
    return str(build_model(scratch, SHAPES[model])) if model in SHAPES else model


def model_flags(model: str, path: str) -> list[str]:
    """The server flags that load `model`, which is at `path`."""
    return ["--model-path", path, *(["--load-format", "dummy"] if model in SHAPES else [])]


def draft_flags(model: str, path: str) -> list[str]:
    """The flag that names the draft for `model`, which is at `path`; servers that do not speculate ignore it."""
    return ["--speculative-draft-model-path", str(Path(path, DRAFT_FOLDER))] if model in DENSE else []


def served_kv_bytes(path: str) -> int:
    """Bytes of KV per token that a server on this machine keeps, for the model at `path`."""
    from transformers import AutoConfig

    return kv_bytes_per_token(AutoConfig.from_pretrained(path), getattr(torch, device_options()["dtype"]))


def load_tokenizer(path: str) -> Callable[[str], list[int]]:
    """The tokenizer of the model at `path`, a function from text to token ids without special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda text: tokenizer.encode(text, add_special_tokens=False)

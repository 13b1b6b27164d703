"""The size of a token's KV, as its tensors take it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config

from benchmark.kv_bytes import kv_bytes_per_token
from benchmark.serving.models import SHAPES, build_model

SIZES = dict(vocab_size=8, hidden_size=48, intermediate_size=16, num_hidden_layers=3, num_attention_heads=6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config_class, more", [(LlamaConfig, dict(head_dim=16)), (Qwen2Config, {})])
def test_what_a_token_takes(config_class, more, dtype):
    """Where the config names the heads' size, and where it follows from the hidden size."""
    config = config_class(**SIZES, num_key_value_heads=2, **more)
    assert hasattr(config, "head_dim") == bool(more)
    model, cache = AutoModelForCausalLM.from_config(config).to(dtype), DynamicCache()
    model(torch.tensor([[1, 2, 3, 4, 5]]), past_key_values=cache)
    taken = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert kv_bytes_per_token(config, dtype) == taken / 5


def test_recurrent_layers_keep_no_kv(tmp_path):
    """Ten of forty layers, each with two heads of 256 dimensions in 16 bits."""
    config = AutoConfig.from_pretrained(build_model(tmp_path, SHAPES["qwen3.6-35b-a3b"]))
    assert kv_bytes_per_token(config) == 10 * 2 * 2 * 256 * 2

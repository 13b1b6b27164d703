"""The size of the KV cache."""

import torch

WITHOUT_KV = ("conv", "linear_attention", "mamba")
"""Kinds of recurrent layers."""


def kv_bytes_per_token(config, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of a token's keys and values in all layers that keep them; recurrent ones do not.

    config: a Hugging Face configuration, or an object with the same attributes.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    num_layers = sum(kind not in WITHOUT_KV for kind in kinds)
    return 2 * num_layers * config.num_key_value_heads * head_dim * dtype.itemsize

"""The size of the KV cache."""

import torch


def kv_bytes_per_token(config, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of a token's keys and values in all layers.

    config: a Hugging Face configuration, or an object with the same attributes.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize

"""The attention layers of a served model, read from SGLang's own modules."""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_lazy.core.model import AttentionLayer, LayerRope
from sglang_lazy.port.model.rope import layer_rope


def attention_modules(model: torch.nn.Module) -> Iterator[Any]:
    """Each module of `model` that prepares queries and keys for an attention layer of its own."""
    return (module for module in model.modules() if isinstance(getattr(module, "attn", None), RadixAttention))


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[RadixAttention, torch.nn.Module | None]]:
    """Each attention layer of `model` with the rotary embedding beside it, or None."""
    found = set()
    for module in attention_modules(model):
        found.add(module.attn)
        yield module.attn, getattr(module, "rotary_emb", None)
    for module in model.modules():
        if isinstance(module, RadixAttention) and module not in found:
            yield module, None


def shared_rotations(model: torch.nn.Module) -> list[Any]:
    """Modules that compute cos and sin for several layers at once, which are given them: Hugging Face's, and SGLang's
    like them."""
    return [module for module in model.modules() if hasattr(module, "inv_freq") and hasattr(module, "rope_init_fn")]


def window_of(attn: RadixAttention) -> int | None:
    """How many positions a token sees in a layer, its own included; SGLang counts those before it."""
    return attn.sliding_window_size + 1 if attn.sliding_window_size > -1 else None


def describe_layers(model: torch.nn.Module, max_position: int, device: str | torch.device) -> dict[int, AttentionLayer]:
    """Each attention layer by id, but for sinks, which only a run of it shows: see `check_layers`."""
    shared: dict[int, LayerRope] = {}
    layers = {}
    for attn, rope in attention_layers(model):
        if id(rope) not in shared:
            shared[id(rope)] = layer_rope(rope, max_position, device)
        shape = attn.tp_q_head_num, attn.tp_k_head_num, attn.qk_head_dim
        layers[attn.layer_id] = AttentionLayer(*shape, shared[id(rope)], window_of(attn))
    return layers

"""The attention layers of a served model and their rotary frequencies, read from SGLang's own modules."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import base, mrope, rope_variant, yarn
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_lazy.core.model import AttentionLayer, LayerRope
from sglang_lazy.port.comb.pool import NO_ROTATION


def _plain(rope: Any) -> torch.Tensor:
    return rope._compute_inv_freq(rope.base)


def _linear(rope: Any) -> torch.Tensor:
    (factor,) = rope.scaling_factors
    return rope._compute_inv_freq(rope.base) / factor


def _dynamic_ntk(rope: Any) -> torch.Tensor:
    # SGLang scales the base once, for the longest sequence, and not by the length of each.
    stretch = rope.scaling_factor**2 - (rope.scaling_factor - 1)
    return rope._compute_inv_freq(rope.base * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _dynamic_ntk_alpha(rope: Any) -> torch.Tensor:
    return rope._compute_inv_freq(rope.base * rope.scaling_alpha ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _yarn(rope: Any) -> torch.Tensor:
    return rope._compute_inv_freq(rope.scaling_factor)


INV_FREQ = {
    base.RotaryEmbedding: _plain,
    base.LinearScalingRotaryEmbedding: _linear,
    rope_variant.Llama3RotaryEmbedding: _plain,
    rope_variant.DynamicNTKScalingRotaryEmbedding: _dynamic_ntk,
    rope_variant.DynamicNTKAlphaRotaryEmbedding: _dynamic_ntk_alpha,
    yarn.YaRNScalingRotaryEmbedding: _yarn,
    # Some of its frequencies are 0.
    rope_variant.Gemma4RotaryEmbedding: _plain,
    # Its axes share these frequencies, each rotating some of the dimensions; text has the same position on all.
    mrope.MRotaryEmbedding: _plain,
}
"""Rotary embeddings whose angles are position times a fixed frequency, which the opposite rotation undoes."""


def on_axes(positions: torch.Tensor, rope: Any) -> torch.Tensor:
    """Positions of text, [n], in the shape that SGLang's module `rope` expects: [3, n] if it has several axes."""
    return positions.repeat(3, 1) if isinstance(rope, mrope.MRotaryEmbedding) else positions


def layer_rope(rope: Any, max_position: int, device: str | torch.device) -> LayerRope:
    """The rotation of `rope`, a rotary module of SGLang or Hugging Face; one that changes nothing if it is None.

    Raises ValueError unless our angles match SGLang's module, up to its float32 rounding and a magnitude.
    """
    if rope is None:
        return LayerRope(torch.zeros(NO_ROTATION), max_position, True, device)
    if type(rope) not in INV_FREQ:
        return LayerRope(rope.inv_freq, max_position, True, device)
    ours = LayerRope(INV_FREQ[type(rope)](rope), max_position, rope.is_neox_style, device)
    theirs = rope._compute_cos_sin_cache()[: min(max_position, 1024)].float().cpu()
    known = ours.cos_sin_cache[: len(theirs)].cpu()
    if not torch.allclose(known, theirs / theirs[0, 0], atol=1e-3):
        raise ValueError(f"{type(rope).__name__}: its angles are not position times frequency as expected")
    return ours


def attention_modules(model: torch.nn.Module) -> Iterator[Any]:
    """Each module of `model` that computes queries and keys for its own attention layer."""
    return (module for module in model.modules() if isinstance(getattr(module, "attn", None), RadixAttention))


def attention_layers(model: torch.nn.Module) -> Iterator[tuple[RadixAttention, torch.nn.Module | None]]:
    """Each attention layer of `model` with its rotary embedding, or None."""
    found = set()
    for module in attention_modules(model):
        found.add(module.attn)
        yield module.attn, getattr(module, "rotary_emb", None)
    for module in model.modules():
        if isinstance(module, RadixAttention) and module not in found:
            yield module, None


@torch.inference_mode()
def given_rotations(model: torch.nn.Module) -> dict[int, Any]:
    """By layer id, the rotary module whose cos and sin an attention layer is passed instead of using its own.

    Hugging Face's models, and SGLang's ports of them, compute them once for several layers. Only the code around the
    layers knows which module serves which layer, so it is run here without attention.
    """
    rotations = [each for each in model.modules() if hasattr(each, "inv_freq") and hasattr(each, "rope_init_fn")]
    if not rotations:
        return {}
    around = next(module for module in model.modules() if any(child in rotations for child in module.children()))
    computed: dict[int, tuple[Any, Any]] = {}
    given: dict[int, Any] = {}

    def record(layer_id: int) -> Callable:
        def forward(hidden_states: torch.Tensor, position_embeddings: Any = None, **_: Any) -> torch.Tensor:
            if position_embeddings is not None:
                given[layer_id] = computed[id(position_embeddings)][0]
            return hidden_states

        return forward

    with contextlib.ExitStack() as undo:
        for rotation in rotations:
            keep = rotation.register_forward_hook(lambda module, _, out: computed.update({id(out): (module, out)}))
            undo.callback(keep.remove)
        for module in attention_modules(around):
            module.forward = record(module.attn.layer_id)
            undo.callback(delattr, module, "forward")
        zero = torch.zeros(1, dtype=torch.int64, device=rotations[0].inv_freq.device)
        around(input_ids=zero, positions=zero, forward_batch=SimpleNamespace(forward_mode=ForwardMode.EXTEND))
    return given


def window_of(attn: RadixAttention) -> int | None:
    """The layer's window size, including the token itself, which SGLang does not count."""
    return attn.sliding_window_size + 1 if attn.sliding_window_size > -1 else None


def describe_layers(model: torch.nn.Module, max_position: int, device: str | torch.device) -> dict[int, AttentionLayer]:
    """Each attention layer by id, without sinks, which are found by running it: see `check_layers`."""
    shared: dict[int, LayerRope] = {}
    layers: dict[int, AttentionLayer] = {}
    given = given_rotations(model)
    for attn, rope in attention_layers(model):
        rope = given.get(attn.layer_id, rope)
        if id(rope) not in shared:
            shared[id(rope)] = layer_rope(rope, max_position, device)
        shape = attn.tp_q_head_num, attn.tp_k_head_num, attn.qk_head_dim
        cap = attn.logit_cap or None
        add_layer(layers, attn.layer_id, AttentionLayer(*shape, shared[id(rope)], window_of(attn), logit_cap=cap))
    return layers


def add_layer(layers: dict[int, AttentionLayer], layer_id: int, layer: AttentionLayer) -> None:
    """Add a layer.  layer_id: SGLang's; layers that read another layer's KV have that layer's id.

    Raises ValueError if `layer` differs from one with the same id.
    """
    if layers.setdefault(layer_id, layer) != layer:
        raise ValueError(f"layers that read the KV of layer {layer_id} differ in more than their queries")

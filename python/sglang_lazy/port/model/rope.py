"""The rotary frequencies of a served model, read from SGLang's own modules."""

from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import base, mrope, rope_variant, yarn

from sglang_lazy.core.model import LayerRope
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

"""The attention layers of a served model and their rotary frequencies, read from SGLang's own modules; and the start-up
check that nothing changes queries and keys between their rotation and attention."""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import base, mrope, rope_variant, yarn
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_lazy.core.model import MAX_PREAMBLE_LEN, NO_ROTATION, AttentionLayer, LayerRope, add_layer


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


POSITIONS = (1, 1000, 1 << 62)
"""Positions at which a layer is compared with itself at position 0; the last means the end of the context."""


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
    for module in model.modules():
        if isinstance(latents := getattr(module, "attn_mqa", None), RadixAttention):
            found |= {latents, module.attn_mha}  # the second is another way to compute the same layer
            yield latents, module.rotary_emb
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


@torch.inference_mode()
def run_layer(
    module: torch.nn.Module, layer: AttentionLayer, hidden_size: int, dtype: torch.dtype, rotation: Any = None
) -> tuple[list[int], list[torch.Tensor], bool]:
    """Run an attention module on one random hidden state at position 0 and others, up to its `RadixAttention`.

    Returns these other positions; q, and k if it has any, at position 0 and at them, each [1 + number of positions,
    heads, head_dim]; and whether attention is passed sinks.

    module: of the model, with its weights loaded.
    rotation: the module that computes its cos and sin, if they are passed to it.
    Raises ValueError if attention is passed more than q, k, v and sinks.
    """
    attn, cos_sin_cache = module.attn, layer.rope.cos_sin_cache
    device = cos_sin_cache.device
    seen: dict[str, torch.Tensor] = {}
    sinks = False
    rope, known = getattr(module, "rotary_emb", None), len(cos_sin_cache) - MAX_PREAMBLE_LEN
    last = min(known, known if rope is None else len(rope.cos_sin_cache)) - 1
    places = sorted({min(position, last) for position in POSITIONS})

    def capture(q, k, v, forward_batch, save_kv_cache=True, **more):
        nonlocal sinks
        sinks = more.pop("sinks", None) is not None
        if given := [name for name, value in more.items() if value is not None]:
            raise ValueError(f"attention takes {', '.join(given)}, which linked attention does not support")
        for name, x in (("q", q), ("k", k)):
            if x is not None:  # a layer may read the keys of another
                seen[name] = x.reshape(len(places) + 1, -1, attn.qk_head_dim).clone()
        return q.new_zeros(len(places) + 1, attn.tp_q_head_num * attn.v_head_dim)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, hidden_size, generator=generator).to(device, dtype).repeat(len(places) + 1, 1)
    positions = torch.tensor([0, *places], device=device)
    if isinstance(rope, mrope.MRotaryEmbedding):
        positions = positions.repeat(3, 1)  # text, on its axes
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    arguments = dict(positions=positions, position_ids=positions, hidden_states=hidden, forward_batch=batch)
    if rotation is not None:
        arguments["position_embeddings"] = rotation(hidden, positions[None])
    attention = getattr(module, "self_attention", module)  # the module may be the whole decoder layer
    names = inspect.signature(getattr(attention, "forward", attention)).parameters
    # Models that fuse rotating and storing do not store without a KV pool of a known dtype.
    pools = SimpleNamespace(token_to_kv_pool=SimpleNamespace(dtype=None), req_to_token_pool=None)
    attn.forward = capture
    try:
        with forward_context(ForwardContext(attn_backend=pools)):
            attention(**{name: value for name, value in arguments.items() if name in names})
    finally:
        del attn.forward
    return places, list(seen.values()), sinks


def check_layers(
    model: torch.nn.Module, layers: Mapping[int, AttentionLayer], hidden_size: int, dtype: torch.dtype
) -> dict[int, AttentionLayer]:
    """`layers` of `model`, with sinks set, and with angles of 0 for layers that do not rotate.

    Raises ValueError if one of them changes q or k between rotation and attention.
    """
    checked: dict[int, AttentionLayer] = {}
    rotations = given_rotations(model)
    for module in attention_modules(model):
        layer_id = module.attn.layer_id
        name = f"{type(module).__name__} of layer {layer_id}"
        try:
            width = getattr(getattr(module, "qkv_proj", None), "input_size", hidden_size)  # some drafts read two states
            places, seen, sinks = run_layer(module, layers[layer_id], width, dtype, rotations.get(layer_id))
        except Exception as error:
            raise ValueError(f"{name} cannot be checked: {error or repr(error)}") from error
        rope = layers[layer_id].rope
        if misfit := rope.misfit(places, seen):
            rope = rope.still
            if rope.misfit(places, seen):
                raise ValueError(f"{name}: {misfit}")
        add_layer(checked, layer_id, dataclasses.replace(layers[layer_id], rope=rope, sinks=sinks))
    return checked

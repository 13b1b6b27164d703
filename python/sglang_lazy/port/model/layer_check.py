"""Start-up check that nothing changes a model's queries and keys between their rotation and attention."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sgl_kernel_lazy import rotate_queries
from sglang_lazy.core.model import MAX_PREAMBLE_LEN, AttentionLayer, LayerRope
from sglang_lazy.port.model.layers import add_layer, attention_modules, given_rotations, on_axes

POSITIONS = (1, 1000, 1 << 62)
"""Positions at which a layer is compared with itself at position 0; the last means the end of the context."""


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
    positions = on_axes(torch.tensor([0, *places], device=device), rope)
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


def first_misfit(rope: LayerRope, places: Sequence[int], seen: Sequence[torch.Tensor]) -> str | None:
    """The first position m at which R(-m) does not rotate q and k back to those of position 0, as text; or None.

    places, seen: from `run_layer`.
    """
    for row, position in enumerate(places, 1):
        off = 0.0
        for rotated in seen:
            back = rotate_queries(rotated[row], position, rope.cos_sin_cache, is_neox=rope.is_neox, inverse=True)
            reference = rotated[0].double()
            off = max(off, ((back.double() - reference).norm() / reference.norm()).item())
        # The model's angles are products in fp32.
        bound = 4 * torch.finfo(seen[0].dtype).eps + 1e-4 + position * torch.finfo(torch.float32).eps
        if not off <= bound:
            return (
                f"rotating a query or key back from position {position} does not give that of position 0 "
                f"(relative error {off:.2g}, at most {bound:.2g} expected)"
            )
    return None


def check_layers(
    model: torch.nn.Module, layers: Mapping[int, AttentionLayer], hidden_size: int, dtype: torch.dtype
) -> dict[int, AttentionLayer]:
    """`layers` of `model`, with sinks set, and with angles of 0 for layers that do not rotate.

    Raises ValueError if one of them changes q or k between rotation and attention.
    """
    checked: dict[int, AttentionLayer] = {}
    still: dict[LayerRope, LayerRope] = {}
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
        if misfit := first_misfit(rope, places, seen):
            if rope not in still:
                still[rope] = rope.still()
            rope = still[rope]
            if first_misfit(rope, places, seen):
                raise ValueError(f"{name}: {misfit}")
        add_layer(checked, layer_id, dataclasses.replace(layers[layer_id], rope=rope, sinks=sinks))
    return checked

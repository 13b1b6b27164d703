"""Start-up check that a model's queries and keys enter attention exactly as the rotation left them."""

import dataclasses
import inspect
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sgl_kernel_lazy import rotate_queries
from sglang_lazy.core.model import MAX_PREAMBLE_LEN, AttentionLayer
from sglang_lazy.port.model.layers import attention_modules, given_rotations
from sglang_lazy.port.model.rope import on_axes

POSITIONS = (1, 1000, 1 << 62)
"""Where a layer is compared with itself at position 0; the last stands for the end of the context."""


@torch.inference_mode()
def probe_layer(
    module: torch.nn.Module, layer: AttentionLayer, hidden_size: int, dtype: torch.dtype, rotation: Any = None
) -> tuple[list[tuple[int, float]], bool]:
    """How far R(-m) is from taking q and k at a position m back to position 0: m, and the worse relative error. And
    whether attention is given sinks.

    module: an attention module of the model, run on one random hidden state at position 0 and others, up to the call of
        its `RadixAttention`, which is replaced meanwhile. Its weights must be loaded.
    rotation: what computes cos and sin, if it is given them.
    Raises ValueError if more than q, k, v and sinks is given to attention.
    """
    attn, rope = module.attn, layer.rope
    device = rope.cos_sin_cache.device
    seen = {}
    sinks = False
    last = min(len(rope.cos_sin_cache) - MAX_PREAMBLE_LEN, len(module.rotary_emb.cos_sin_cache)) - 1
    places = sorted({min(position, last) for position in POSITIONS})

    def capture(q, k, v, forward_batch, save_kv_cache=True, **more):
        nonlocal sinks
        sinks = more.pop("sinks", None) is not None
        if given := [name for name, value in more.items() if value is not None]:
            raise ValueError(f"attention takes {', '.join(given)}, too, which linked attention does not know")
        seen["q"] = q.reshape(len(places) + 1, -1, attn.qk_head_dim).clone()
        seen["k"] = k.reshape(len(places) + 1, -1, attn.qk_head_dim).clone()
        return q.new_zeros(len(places) + 1, attn.tp_q_head_num * attn.v_head_dim)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, hidden_size, generator=generator).to(device, dtype).repeat(len(places) + 1, 1)
    positions = on_axes(torch.tensor([0, *places], device=device), module.rotary_emb)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    arguments = dict(positions=positions, position_ids=positions, hidden_states=hidden, forward_batch=batch)
    if rotation is not None:
        arguments["position_embeddings"] = rotation(hidden, positions[None])
    names = inspect.signature(module.forward).parameters
    # Without a KV pool of a known dtype, models store nothing while they rotate.
    pools = SimpleNamespace(token_to_kv_pool=SimpleNamespace(dtype=None), req_to_token_pool=None)
    attn.forward = capture
    try:
        with forward_context(ForwardContext(attn_backend=pools)):
            module(**{name: value for name, value in arguments.items() if name in names})
    finally:
        del attn.forward
    errors = []
    for row, position in enumerate(places, 1):
        worst = 0.0
        for rotated in seen.values():
            back = rotate_queries(rotated[row], position, rope.cos_sin_cache, is_neox=rope.is_neox, inverse=True)
            reference = rotated[0].double()
            worst = max(worst, ((back.double() - reference).norm() / reference.norm()).item())
        errors.append((position, worst))
    return errors, sinks


def check_layers(
    model: torch.nn.Module, layers: Mapping[int, AttentionLayer], hidden_size: int, dtype: torch.dtype
) -> dict[int, AttentionLayer]:
    """`layers` of `model`, and which of them have sinks.

    Raises ValueError if something stands between the rotation and attention in one of them.
    """
    checked = {}
    rotations = given_rotations(model)
    for module in attention_modules(model):
        layer_id = module.attn.layer_id
        name = f"{type(module).__name__} of layer {layer_id}"
        try:
            errors, sinks = probe_layer(module, layers[layer_id], hidden_size, dtype, rotations.get(layer_id))
        except Exception as error:
            raise ValueError(f"{name} cannot be probed: {error or repr(error)}") from error
        for position, off in errors:
            # The model's angles are products in fp32.
            bound = 4 * torch.finfo(dtype).eps + 1e-4 + position * torch.finfo(torch.float32).eps
            if not off <= bound:
                raise ValueError(
                    f"{name}: rotating a query or key back from position {position} does not give that of position 0 "
                    f"(relative error {off:.2g}, at most {bound:.2g} expected)"
                )
        checked[layer_id] = dataclasses.replace(layers[layer_id], sinks=sinks)
    return checked

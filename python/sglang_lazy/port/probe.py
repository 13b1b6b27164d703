"""Start-up check that a model's queries and keys enter attention exactly as the rotation left them."""

from types import SimpleNamespace

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sgl_kernel_lazy import rotate_queries
from sglang_lazy.core.model import LayerRope

POSITION = 1000


@torch.inference_mode()
def rotation_error(module: torch.nn.Module, rope: LayerRope, hidden_size: int, dtype: torch.dtype) -> float:
    """How far R(-m) is from taking q and k at position m back to position 0; relative, the worse of the two.

    module: an attention module of the model, run on one random hidden state at positions 0 and m, up to the call of
        its `RadixAttention`, which is replaced meanwhile. Its weights must be loaded.
    """
    attn: RadixAttention = module.attn
    device = rope.cos_sin_cache.device
    seen = {}

    def capture(q, k, v, *_args, **_kwargs):
        seen["q"] = q.reshape(2, -1, attn.qk_head_dim).clone()
        seen["k"] = k.reshape(2, -1, attn.qk_head_dim).clone()
        return q.new_zeros(2, attn.tp_q_head_num * attn.v_head_dim)

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, hidden_size, generator=generator).to(device, dtype).repeat(2, 1)
    position = min(POSITION, len(rope.cos_sin_cache) - 1)
    positions = torch.tensor([0, position], device=device)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    # Without a KV pool of a known dtype, models store nothing while they rotate.
    pools = SimpleNamespace(token_to_kv_pool=SimpleNamespace(dtype=None), req_to_token_pool=None)
    attn.forward = capture
    try:
        with forward_context(ForwardContext(attn_backend=pools)):
            module(positions=positions, hidden_states=hidden, forward_batch=batch)
    finally:
        del attn.forward
    errors = []
    for rotated in seen.values():
        back = rotate_queries(rotated[1], position, rope.cos_sin_cache, is_neox=rope.is_neox, inverse=True).double()
        reference = rotated[0].double()
        errors.append(((back - reference).norm() / reference.norm()).item())
    return max(errors)


def check_rotation(model: torch.nn.Module, ropes: dict[int, LayerRope], hidden_size: int, dtype: torch.dtype) -> None:
    """Raise ValueError if something stands between the rotation and attention in the first layer of `model`."""
    module = next(module for module in model.modules() if isinstance(getattr(module, "attn", None), RadixAttention))
    error = rotation_error(module, ropes[module.attn.layer_id], hidden_size, dtype)
    bound = 4 * torch.finfo(dtype).eps + 1e-4
    if not error <= bound:
        raise ValueError(
            f"{type(module).__name__}: rotating a query back by its position does not give the query at position 0 "
            f"(relative error {error:.2g}, at most {bound:.2g} expected)"
        )

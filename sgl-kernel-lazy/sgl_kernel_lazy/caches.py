"""The caches of several layers, checked once: what `copy_rotated` copies within."""

import dataclasses
from collections.abc import Sequence

import torch

from sgl_kernel_lazy.validation import FLOATS, INTEGERS, check_cos_sin, check_tensor


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Caches:
    """The caches of layers that rotate alike. They may be written to in place.

    k_caches, v_caches: a cache of each layer, [num_slots, num_kv_heads, head_dim], all alike; KV tokens contiguous.
    cos_sin_cache: [num_rows, rotary_dim] fp32, see `rope_cos_sin`.
    is_neox: whether it pairs dimensions across halves (NeoX), or interleaved ones.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """

    k_caches: Sequence[torch.Tensor]
    v_caches: Sequence[torch.Tensor]
    cos_sin_cache: torch.Tensor
    is_neox: bool

    def __post_init__(self) -> None:
        k_caches, v_caches = self.k_caches, self.v_caches
        if not k_caches or len(k_caches) != len(v_caches):
            raise ValueError(
                f"k_caches, v_caches: expected as many, at least one, got {len(k_caches)} and {len(v_caches)}"
            )
        like = k_caches[0]
        check_tensor("k_caches[0]", like, (None, None, None), FLOATS, like.device)
        head_dim = like.shape[2]
        for name, caches in dict(k_caches=k_caches, v_caches=v_caches).items():
            for layer, cache in enumerate(caches):
                check_tensor(f"{name}[{layer}]", cache, like.shape, (like.dtype,), like.device)
                if cache.stride() != like.stride() or cache.stride()[1:] != (head_dim, 1):
                    raise ValueError(
                        f"{name}[{layer}]: expected contiguous KV tokens at the strides of k_caches[0], "
                        f"{list(like.stride())}, got {list(cache.stride())}"
                    )
        check_cos_sin(self.cos_sin_cache, head_dim, like.device)


def check_copies(caches: Caches, source: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> None:
    """Check the arguments of `copy_rotated`. Done for each call."""
    device = caches.cos_sin_cache.device
    check_tensor("source", source, (None,), INTEGERS, device)
    check_tensor("target", target, source.shape, INTEGERS, device)
    check_tensor("offsets", offsets, source.shape, INTEGERS, device)

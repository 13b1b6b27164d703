"""What policies and kernels see of the served model."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from sgl_kernel_lazy import rope_cos_sin

T = TypeVar("T")

MAX_PREAMBLE_LEN = 512
"""Tokens of the server's neutral preamble at most: so far may a chunk stand before the position it was computed at."""


class LayerRope:
    """The rotation of one or more attention layers.

    cos_sin_cache: float32 [max_position + MAX_PREAMBLE_LEN, rotary_dim], without YaRN's magnitude factor, which queries
        carry already. Its last rows are those of negative positions, as Python counts them.
    is_neox: how dimensions are paired.
    """

    def __init__(self, inv_freq: torch.Tensor, max_position: int, is_neox: bool, device: str | torch.device):
        inv_freq = inv_freq.to(torch.float64).cpu()
        self.cos_sin_cache = rope_cos_sin(inv_freq, max_position, MAX_PREAMBLE_LEN).to(device)
        self.is_neox = is_neox

    def still(self) -> "LayerRope":
        """Of layers that do not rotate: the same shape, and angles of 0."""
        num_rows, rotary_dim = self.cos_sin_cache.shape
        device = self.cos_sin_cache.device
        return LayerRope(torch.zeros(rotary_dim // 2), num_rows - MAX_PREAMBLE_LEN, self.is_neox, device)


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """What linked attention has to know of a layer.

    num_qo_heads, num_kv_heads: of this tensor-parallel rank.
    rope: layers with the same rotary embedding share one object.
    window: how many positions a token sees, its own included; None: all before it.
    sinks: whether each head has a sink: a score without a value, which takes part in its softmax.
    logit_cap: c where scores are c tanh(score / c).
    kernels: the implementation from `sgl_kernel_lazy` that attends; None until one has been chosen.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope: LayerRope
    window: int | None = None
    sinks: bool = False
    logit_cap: float | None = None
    kernels: Any = None

    @functools.cached_property
    def decode_plan(self) -> "DecodePlan":
        return DecodePlan(self.window, self.kernels, self.num_qo_heads, self.num_kv_heads, self.head_dim)


class DecodePlan(NamedTuple):
    """What layers have in common for which a decode step is planned once."""

    window: int | None
    kernels: Any
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def dims(self) -> dict[str, int]:
        """As `plan_decode` and `decode_workspace` take them."""
        return dict(num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)


@dataclasses.dataclass
class ServedModel:
    """The loaded model, as far as its KV has to be read, rotated or copied.

    kv_buffers: K and V caches by layer id, each [num_slots, num_kv_heads, head_dim].
    layers: by layer id, that of the KV: layers which read another one's are with that.
    window_slots: where layers with windows have the KV of these slots, int64, if it is in a pool of its own; 0 where
        that has none.
    """

    kv_buffers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    layers: Mapping[int, AttentionLayer]
    window_slots: Callable[[torch.Tensor], torch.Tensor] | None = None
    _parts: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def windows(self) -> set[int]:
        """Those that layers have."""
        return {layer.window for layer in self.layers.values() if layer.window is not None}

    def keeps_all(self, layer_id: int) -> bool:
        """Whether a layer has the KV of all tokens of a chunk that is cached."""
        return self.window_slots is None or self.layers[layer_id].window is None

    def rotations(self, offsets: Sequence[int]) -> list[int]:
        """The places in each `cos_sin_cache` of these positions, down to -MAX_PREAMBLE_LEN."""
        num_rotations = len(next(iter(self.layers.values())).rope.cos_sin_cache)
        return [offset % num_rotations for offset in offsets]

    def part(self, build: "Callable[[ServedModel], T]") -> T:
        """What `build` makes of this model, made at first use."""
        if build not in self._parts:
            self._parts[build] = build(self)
        return self._parts[build]

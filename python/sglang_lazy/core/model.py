"""The served model as policies and kernels see it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from sgl_kernel_lazy import rope_cos_sin, rotate_queries
from sgl_kernel_lazy.layer import Layer

T = TypeVar("T")

MAX_PREAMBLE_LEN = 512
"""Maximum tokens of the neutral preamble, so a chunk's offset is at least minus this."""

NO_ROTATION = 16
"""Number of frequencies, all zero, of a rotation that changes nothing; all kernels support this many."""


class LayerRope:
    """The rotary embedding of one or more attention layers.

    cos_sin_cache: float32 [max_position + MAX_PREAMBLE_LEN, rotary_dim], without YaRN's magnitude factor, which queries
        carry already. The last rows are for negative positions, as in Python indexing.
    is_neox: whether dimensions are paired across halves (NeoX) rather than interleaved.
    """

    def __init__(self, inv_freq: torch.Tensor, max_position: int, is_neox: bool, device: str | torch.device):
        inv_freq = inv_freq.to(torch.float64).cpu()
        self.cos_sin_cache = rope_cos_sin(inv_freq, max_position, MAX_PREAMBLE_LEN).to(device)
        self.is_neox = is_neox

    @functools.cached_property
    def still(self) -> "LayerRope":
        """The same shape with angles of 0, for layers without rotation."""
        num_rows, rotary_dim = self.cos_sin_cache.shape
        device = self.cos_sin_cache.device
        return LayerRope(torch.zeros(rotary_dim // 2), num_rows - MAX_PREAMBLE_LEN, self.is_neox, device)

    def misfit(self, places: Sequence[int], seen: Sequence[torch.Tensor]) -> str | None:
        """The first position m at which R(-m) does not rotate q and k back to those of position 0, as text; or None.

        seen: q and k of one token at position 0 and at `places`, each [1 + len(places), heads, head_dim].
        """
        for row, position in enumerate(places, 1):
            off = 0.0
            for rotated in seen:
                back = rotate_queries(rotated[row], position, self.cos_sin_cache, is_neox=self.is_neox, inverse=True)
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


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """One attention layer, as linked attention needs to know it.

    num_qo_heads, num_kv_heads: of this tensor-parallel rank.
    rope: layers with the same rotary embedding share one object.
    window: how many positions a token sees, including its own; None for all.
    sinks: whether each head has an attention sink, a score without a value that joins the softmax.
    logit_cap: c if scores are capped as c tanh(score / c).
    kernels: an implementation from `sgl_kernel_lazy`; None until one is chosen.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope: LayerRope
    window: int | None = None
    sinks: bool = False
    logit_cap: float | None = None
    kernels: Any = None

    def with_caches(
        self,
        caches: tuple[torch.Tensor, torch.Tensor],
        dtype: torch.dtype,
        sm_scale: float,
        v_scale: float = 1.0,
        sinks: torch.Tensor | None = None,
    ) -> Layer:
        """The layer as kernels take it.  caches: of keys and values; for the rest see `Layer`."""
        return Layer(
            num_qo_heads=self.num_qo_heads,
            dtype=dtype,
            k_cache=caches[0],
            v_cache=caches[1],
            cos_sin_cache=self.rope.cos_sin_cache,
            is_neox=self.rope.is_neox,
            sm_scale=sm_scale,
            v_scale=v_scale,
            window=self.window,
            sinks=sinks,
            logit_cap=self.logit_cap,
        )

    @functools.cached_property
    def decode_plan(self) -> "DecodePlan":
        return DecodePlan(self.window, self.kernels, self.num_qo_heads, self.num_kv_heads, self.head_dim)


def add_layer(layers: dict[int, AttentionLayer], layer_id: int, layer: AttentionLayer) -> None:
    """Add a layer.  layer_id: layers that read another layer's KV have that layer's.

    Raises ValueError if `layer` differs from one with the same id.
    """
    if layers.setdefault(layer_id, layer) != layer:
        raise ValueError(f"layers that read the KV of layer {layer_id} differ in more than their queries")


class DecodePlan(NamedTuple):
    """The properties shared by layers for which a decode step is planned together."""

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
    """The loaded model's KV cache, layers and kernels.

    kv_buffers: K and V caches by layer id, each [num_slots, num_kv_heads, head_dim].
    layers: by layer id; a layer that reads the KV of another has no entry of its own.
    window_slots: int64 [num_slots or more], of each slot that in the window layers' own pool, 0 for none; the same
        tensor for ever, whatever its data. None without such a pool.
    draft: the model that drafts tokens for this one, with KV of its own in the same slots; None without one.
    """

    kv_buffers: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    layers: Mapping[int, AttentionLayer]
    window_slots: torch.Tensor | None = None
    draft: "ServedModel | None" = None
    _parts: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def windows(self) -> set[int]:
        """All window sizes of its layers."""
        return {layer.window for layer in self.layers.values() if layer.window is not None}

    @functools.cached_property
    def first_layers(self) -> dict[DecodePlan, int]:
        """By plan, the first of its layers that a pass runs."""
        return {self.layers[layer_id].decode_plan: layer_id for layer_id in sorted(self.layers, reverse=True)}

    def keeps_all(self, layer_id: int) -> bool:
        """Whether a layer keeps the KV of all tokens of a cached chunk."""
        return self.window_slots is None or self.layers[layer_id].window is None

    def rotations(self, offsets: Sequence[int]) -> list[int]:
        """The rows of each `cos_sin_cache` for these positions, which are at least -MAX_PREAMBLE_LEN."""
        num_rotations = next(iter(self.layers.values())).rope.cos_sin_cache.shape[0]
        return [offset % num_rotations for offset in offsets]

    def part(self, build: "Callable[[ServedModel], T]") -> T:
        """The result of `build(self)`, computed once."""
        if build not in self._parts:
            self._parts[build] = build(self)
        return self._parts[build]

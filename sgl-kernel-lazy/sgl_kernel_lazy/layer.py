"""A layer of attention, checked once: what it passes to the ops beside its queries and the batch's `Rows`."""

import dataclasses
import functools
from typing import NamedTuple

import torch

from sgl_kernel_lazy.rows import ExtendRows, Rows
from sgl_kernel_lazy.validation import FLOATS, FP8, check_cos_sin, check_tensor, check_window, shape_of


class LayerKind(NamedTuple):
    """What decides whether an implementation serves a layer, and with which of its kernels.

    dtype: of queries.  kv_dtype: of caches, the same or fp8.
    windowed, sinks, capped: whether it has a window, sinks, or a logit cap.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    windowed: bool = False
    sinks: bool = False
    capped: bool = False


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Layer:
    """A layer's caches, and all that does not depend on the batch. Caches may be written to in place.

    dtype: of queries, fp32, fp16 or bf16.
    k_cache, v_cache: [num_slots, num_kv_heads, head_dim], both in this dtype or in fp8 (e4m3fn, e5m2), which is widened
        without loss. At most 2**31 slots.
    cos_sin_cache: [num_rows, rotary_dim] fp32, with rows for negative offsets where there are any: see `rope_cos_sin`.
    is_neox: whether it pairs dimensions across halves (NeoX), or interleaved ones.
    sm_scale: what scores are multiplied by, positive.
    v_scale: what fp8 values were divided by when they were stored; results are multiplied by it. For keys that were
        divided by a scale, multiply sm_scale by it.
    window: how many positions a query sees, its own included; None for all. In decode the rows list what it sees.
    sinks: [num_qo_heads], fp32, fp16 or bf16: a score of each head that takes part in its softmax, without a value.
    logit_cap: a positive bound c on scores, each of which is c tanh(score / c); not on sinks.
    Raises ValueError on a shape, dtype, device or stride mismatch.
    """

    num_qo_heads: int
    dtype: torch.dtype
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cos_sin_cache: torch.Tensor
    is_neox: bool
    sm_scale: float
    v_scale: float = 1.0
    window: int | None = None
    sinks: torch.Tensor | None = None
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        device, heads = self.k_cache.device, self.num_qo_heads
        if self.dtype not in FLOATS:
            raise ValueError(f"dtype: expected {' or '.join(map(str, FLOATS))}, got {self.dtype}")
        num_slots, num_kv_heads, head_dim = shape = shape_of("k_cache", self.k_cache, 3)
        check_tensor("k_cache", self.k_cache, shape, (self.dtype, *FP8), device)
        # Kernels hold slots as int32, whatever the dtype of kv_indices.
        if num_slots > 2**31:
            raise ValueError(f"k_cache: expected at most 2**31 slots, got {num_slots}")
        check_tensor("v_cache", self.v_cache, shape, (self.k_cache.dtype,), device)
        if num_kv_heads == 0 or heads % num_kv_heads:
            raise ValueError(f"num_qo_heads: expected a multiple of {num_kv_heads} kv heads, got {heads}")
        if not 32 <= head_dim <= 512 or head_dim % 8:
            raise ValueError(f"k_cache: expected head_dim to be a multiple of 8 from 32 to 512, got {head_dim}")
        check_cos_sin(self.cos_sin_cache, head_dim, device)
        if not self.sm_scale > 0:
            raise ValueError(f"sm_scale: expected a positive number, got {self.sm_scale}")
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise ValueError(f"logit_cap: expected a positive number or None, got {self.logit_cap}")
        if self.v_scale != 1.0 and self.k_cache.dtype not in FP8:
            raise ValueError(f"v_scale: expected 1 for caches that are not fp8, got {self.v_scale}")
        check_window(self.window)
        if self.sinks is not None:
            check_tensor("sinks", self.sinks, (heads,), FLOATS, device)

    @functools.cached_property
    def kind(self) -> LayerKind:
        _, num_kv_heads, head_dim = self.k_cache.shape
        return LayerKind(
            self.dtype,
            self.k_cache.dtype,
            self.num_qo_heads,
            num_kv_heads,
            head_dim,
            self.cos_sin_cache.shape[1],
            windowed=self.window is not None,
            sinks=self.sinks is not None,
            capped=self.logit_cap is not None,
        )

    @functools.cached_property
    def dims(self) -> tuple[int, int, int]:
        """num_qo_heads, num_kv_heads, head_dim."""
        return self.kind.num_qo_heads, self.kind.num_kv_heads, self.kind.head_dim


def check_queries(
    q: torch.Tensor,
    layer: Layer,
    rows: Rows,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Check that queries and outputs fit a layer and a batch; see `link_decode`. Done for each call."""
    device = rows.device
    if layer.k_cache.device != device:
        raise ValueError(f"k_cache: expected device {device}, got {layer.k_cache.device}")
    shape = (rows.num_queries, layer.num_qo_heads, layer.dims[2])
    check_tensor("q", q, shape, (layer.dtype,), device)
    if out is not None:
        check_tensor("out", out, shape, (layer.dtype,), device)
    if lse is not None:
        check_tensor("lse", lse, shape[:2], (torch.float32,), device)


def check_sums_and_queries(sums: torch.Tensor, q: torch.Tensor, layer: Layer, rows: ExtendRows) -> None:
    """Check the arguments of `accumulate_attention`, whose kernels know no windows."""
    if layer.window is not None:
        raise ValueError(f"window: expected None, got {layer.window}")
    check_queries(q, layer, rows)
    check_tensor("sums", sums, (None,), (torch.float32,), rows.device)

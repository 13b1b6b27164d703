"""Decode over cached chunks in CUDA; a chunk that several requests share is read once for all of them."""

import functools
from typing import Any

import torch

from sgl_kernel_lazy.cuda.jit import CTYPES, KV_FP8, kernel_sinks, load_module
from sgl_kernel_lazy.device import num_sms
from sgl_kernel_lazy.layer import Layer, LayerKind, check_queries
from sgl_kernel_lazy.rows import Rows

# A chunk is read once for all its users, rather than by each, if that saves this many reads: (users - 1) * tokens.
MIN_SAVED_TOKENS = 64
# Tiles that a block computes before it asks for more; 0 lets the plan choose.
SPAN = 0
# head_dim: query heads per kv head, at most
MAX_GROUP_SIZES = {64: 32, 128: 32, 256: 16}


def refusal(kind: LayerKind) -> str | None:
    """The unmet requirement of `link_decode`, or None; `sgl_kernel_lazy.triton` supports all that it refuses."""
    dtype, kv_dtype, head_dim, rotary_dim = kind.dtype, kind.kv_dtype, kind.head_dim, kind.rotary_dim
    num_kv_heads, group_size = kind.num_kv_heads, kind.num_qo_heads // kind.num_kv_heads
    if dtype not in CTYPES:
        return f"expected queries in {' or '.join(map(str, CTYPES))}, got {dtype}"
    if head_dim not in MAX_GROUP_SIZES:
        return f"expected head_dim to be one of {tuple(MAX_GROUP_SIZES)}, got {head_dim}"
    if rotary_dim % 16:
        return f"expected rotary_dim to be a multiple of 16, got {rotary_dim}"
    if group_size > MAX_GROUP_SIZES[head_dim]:
        return f"expected at most {MAX_GROUP_SIZES[head_dim]} query heads per kv head, got {group_size}"
    if kv_dtype == dtype:
        return None
    # As in csrc/decode_plan.cuh; TMA copies whole lines of 128 bytes.
    heads_at_once = next(n for n in range(min(num_kv_heads, 4), 0, -1) if num_kv_heads % n == 0)
    if head_dim > 128 or rotary_dim % 32 or heads_at_once * head_dim % 128:
        return (
            f"expected for {kv_dtype} caches head_dim 64 or 128, rotary_dim a multiple of 32, and heads copied at once "
            f"that take a multiple of 128 bytes, got {head_dim}, {rotary_dim} and {heads_at_once} heads"
        )
    return None


def decode_workspace(
    max_bs: int,
    max_segments: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> torch.Tensor:
    """A float32 buffer for `plan_decode` and `link_decode`, for batches of up to max_bs requests of up to max_segments
    segments (the width of the segment tables); it may be uninitialized.

    Its bytes: 20 * max_bs * max_segments for the plan, and num_qo_heads * (2 * head_dim + 8) for each partial result:
    one per request, and 9,000 to 20,000 for shared chunks and cuts (with fewer than 4 kv heads, each is in several
    parts). With 32 query heads and 8 kv heads of 128, 256 requests of 256 segments take 104 MB, and 4,097 take 157 MB.
    If a batch shares more than fits, 8,192 uses of chunks and 32,768 ids, each request reads the rest by itself.
    Calls raise ValueError if the workspace is too small for their batch.
    """
    device = torch.device(device)
    words = load_module("plan_decode").workspace_words(
        max_bs, max_segments, num_qo_heads, num_kv_heads, head_dim, num_sms(device)
    )
    return torch.empty(words, dtype=torch.float32, device=device)


def plan_decode(
    workspace: torch.Tensor,
    rows: Rows,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Write the schedule of a batch into the workspace, on the device: one launch per step, before all layers.

    Same contract as `sgl_kernel_lazy.torch_impl.plan_decode`.
    """
    segment_ids = torch.full_like(rows.segment_ends, -1) if rows.segment_ids is None else rows.segment_ids
    load_module("plan_decode").plan_decode(
        workspace, rows.kv_indptr, rows.num_segments, rows.segment_ends, rows.segment_offsets, segment_ids,
        num_qo_heads, num_kv_heads, head_dim, num_sms(workspace.device), MIN_SAVED_TOKENS, SPAN,
    )  # fmt: skip


@functools.cache
def _module(kind: LayerKind, is_neox: bool) -> Any:
    """The kernels for such a layer. Raises ValueError where there are none."""
    if reason := refusal(kind):
        raise ValueError(f"link_decode: {reason}")
    return load_module(
        "link_decode",
        dtype=CTYPES[kind.dtype], kv_fp8=KV_FP8.get(kind.kv_dtype, 0), head_dim=kind.head_dim,
        rotary_dim=kind.rotary_dim, is_neox=int(is_neox), capped=int(kind.capped),
    )  # fmt: skip


def link_decode(
    q: torch.Tensor,
    layer: Layer,
    rows: Rows,
    *,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same contract as `sgl_kernel_lazy.torch_impl.link_decode`, for fp16 and bf16.

    The heads of a slot are contiguous in both caches. With fp8, queries and weights are multiplied as fp16.

    With workspace and out, the call allocates nothing and does not synchronize with the device, so it can be captured
    in a CUDA graph, with the plan inside or outside of it.
    """
    check_queries(q, layer, rows, out, lse)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if rows.bs == 0:
        return out
    module = _module(layer.kind, layer.is_neox)
    if workspace is None:
        num_qo_heads, num_kv_heads, head_dim = layer.dims
        workspace = decode_workspace(rows.bs, rows.max_segments, *layer.dims, q.device)
        plan_decode(workspace, rows, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    module.link_decode(
        q, layer.k_cache, layer.v_cache, rows.kv_indices.to(torch.int32), rows.max_segments, layer.cos_sin_cache,
        workspace, kernel_sinks(layer), out, lse, layer.sm_scale, layer.v_scale, layer.logit_cap or 0.0,
        num_sms(q.device),
    )  # fmt: skip
    return out

"""Checks of what a layer passes to an op beside the batch's `Rows`, without device synchronization."""

from collections.abc import Sequence

import torch

from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.validation import FLOATS, FP8, check_cos_sin, check_tensor, shape_of


def check_layer(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: Rows,
    cos_sin_cache: torch.Tensor,
    sm_scale: float,
    *,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    logit_cap: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kv_dtypes: Sequence[torch.dtype] = FP8,
) -> None:
    """Check the common arguments of `link_decode`, `link_extend` and `accumulate_attention`; see their docstrings.

    kv_dtypes: the dtypes of caches besides q's.
    """
    device = rows.device
    dtype, kv_dtype = q.dtype, k_cache.dtype
    _, num_qo_heads, head_dim = shape_of("q", q, 3)
    q_shape = (rows.num_queries, num_qo_heads, head_dim)
    check_tensor("q", q, q_shape, FLOATS, device)
    num_slots, num_kv_heads, _ = shape_of("k_cache", k_cache, 3)
    kv_shape = (num_slots, num_kv_heads, head_dim)
    check_tensor("k_cache", k_cache, kv_shape, (dtype,) if kv_dtype == dtype else (dtype, *kv_dtypes), device)
    # Kernels hold slots as int32, whatever the dtype of kv_indices.
    if num_slots > 2**31:
        raise ValueError(f"k_cache: expected at most 2**31 slots, got {num_slots}")
    if v_cache is not k_cache:
        check_tensor("v_cache", v_cache, kv_shape, (kv_dtype,), device)
    if num_kv_heads == 0 or num_qo_heads % num_kv_heads:
        raise ValueError(f"q: expected num_qo_heads to be a multiple of {num_kv_heads} kv heads, got {num_qo_heads}")
    if not 32 <= head_dim <= 512 or head_dim % 8:
        raise ValueError(f"q: expected head_dim to be a multiple of 8 from 32 to 512, got {head_dim}")
    check_cos_sin(cos_sin_cache, head_dim, device)
    if not sm_scale > 0:
        raise ValueError(f"sm_scale: expected a positive number, got {sm_scale}")
    if logit_cap is not None and not logit_cap > 0:
        raise ValueError(f"logit_cap: expected a positive number or None, got {logit_cap}")
    if v_scale != 1.0 and kv_dtype not in FP8:
        raise ValueError(f"v_scale: expected 1 for caches that are not fp8, got {v_scale}")
    if sinks is not None:
        check_tensor("sinks", sinks, (num_qo_heads,), FLOATS, device)
    if out is not None:
        check_tensor("out", out, q_shape, (dtype,), device)
    if lse is not None:
        check_tensor("lse", lse, q_shape[:2], (torch.float32,), device)

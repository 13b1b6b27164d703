"""FlashInfer's attention over work items, and the Triton kernels around it: rotate the queries, merge the results.

A work item is a range of query rows over a range of KV tokens: one request of FlashInfer's.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.utils import device_support_pdl

from sgl_kernel_lazy.device import num_sms
from sgl_kernel_lazy.layer import Layer, LayerKind
from sgl_kernel_lazy.triton.common import jit, merge_step, merged, partner_dim, rotate_back

DTYPES, HEAD_DIMS = (torch.float16, torch.bfloat16), (64, 128, 256)
INT_WORKSPACE_BYTES = 8 << 20
# Heads and warps of a program that rotates a row.
ROTATED_HEADS, ROTATE_WARPS = 16, 4
NON_CAUSAL, CAUSAL, NHD = 0, 1, 0


def refusal(kind: LayerKind) -> str | None:
    """The unmet requirement of FlashInfer's kernels as used here, or None."""
    if kind.dtype not in DTYPES:
        return f"expected queries in {' or '.join(map(str, DTYPES))}, got {kind.dtype}"
    if kind.kv_dtype != kind.dtype:
        return f"expected caches in the queries' {kind.dtype}, got {kind.kv_dtype}"
    if kind.head_dim not in HEAD_DIMS:
        return f"expected head_dim to be one of {HEAD_DIMS}, got {kind.head_dim}"
    if kind.windowed or kind.sinks or kind.capped:
        return "expected neither windows nor sinks nor logit caps"
    return None


def check_supported(op: str, layer: Layer) -> None:
    """Raise ValueError with the result of `refusal`, if any."""
    if reason := refusal(layer.kind):
        raise ValueError(f"{op}: {reason}")


@functools.cache
def float_workspace(group: int, device: torch.device) -> torch.Tensor:
    """Partial results of FlashInfer's own splits, of which it makes at most two per SM and query head."""
    tiles = 2 * num_sms(device) + 8
    return torch.empty(tiles * group * 128 * (128 + 4) * 4, dtype=torch.uint8, device=device)


class Kernel:
    """FlashInfer's fa2 or fa3, planned for items: rows qo_indptr[i] .. [i + 1] over slots kv_indptr[i] .. [i + 1].

    Holds the plan; each run gets the lists again, as device tensors. If split is False, the lists of keys may differ
    from the planned ones as long as no tile becomes empty.
    """

    def __init__(
        self,
        backend: str,
        q: torch.Tensor,
        num_kv_heads: int,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        *,
        causal: bool,
        split: bool = True,
    ):
        _, num_qo_heads, head_dim = q.shape
        self.backend, self.mask = backend, CAUSAL if causal else NON_CAUSAL
        self.pdl = device_support_pdl(q.device)
        types = (q.dtype, q.dtype, q.dtype, torch.int32, head_dim, head_dim)
        self.module = get_batch_prefill_module(backend, *types, 0, False, False, False)
        self.floats = float_workspace(num_qo_heads // num_kv_heads, q.device)
        self.ints = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
        self.pinned = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=True)
        last_page_len = torch.ones(len(qo_indptr) - 1, dtype=torch.int32)
        self.last_page_len = last_page_len.to(q.device, non_blocking=True)
        splitting: Sequence[int] = (-1, not split, 0) if backend == "fa2" else ()
        self.plan = self.module.plan(
            self.floats, self.ints, self.pinned, qo_indptr, kv_indptr, kv_indptr.diff(),
            int(qo_indptr[-1]), len(last_page_len), num_qo_heads, num_kv_heads, 1, False, head_dim, head_dim,
            causal, -1, *splitting,
        )  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        sm_scale: float,
    ) -> None:
        """Write out [rows, num_qo_heads, head_dim], normalized, and lse [rows, num_qo_heads], fp32, base 2."""
        self.module.paged_run(
            self.floats, self.ints, self.plan, q, k_cache.unsqueeze(1), v_cache.unsqueeze(1),
            qo_indptr, kv_indptr, kv_indices, self.last_page_len, out, lse, self.mask, NHD, -1, self.pdl,
            *(None,) * 6, 0.0, sm_scale, None, None, None, 1.0, 1e4, 0, 0,
        )  # fmt: skip


@jit
def _rotate_kernel(
    q, rotated, rows, offsets, cos_sin_cache, stride_q_row, stride_q_head, stride_position,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, IS_NEOX: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """rotated[i] = R(-offsets[i]) q[rows[i]], in float32 and rounded once; nothing where rows[i] is negative."""
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i).to(tl.int64)
    if row < 0:
        return
    offset = tl.load(offsets + i).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    mask = (head < HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    source = q + row * stride_q_row + head[:, None] * stride_q_head
    value = tl.load(source + dim[None, :], mask=mask, other=0.0)
    if offset != 0:
        partner = tl.load(source + partner_dim(dim, ROTARY_DIM, IS_NEOX)[None, :], mask=mask, other=0.0)
        value = rotate_back(
            value, partner, dim, offset, cos_sin_cache, stride_position, ROTARY_DIM, IS_NEOX, tl.float32
        )
    tl.store(rotated + i * HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + dim[None, :], value, mask=mask)


def rotate(
    q: torch.Tensor,
    rows: torch.Tensor,
    offsets: torch.Tensor,
    layer: Layer,
) -> torch.Tensor:
    """R(-offsets[i]) q[rows[i]] for every i, as [len(rows), num_qo_heads, head_dim]."""
    _, heads, head_dim = q.shape
    rotated = torch.empty(len(rows), heads, head_dim, dtype=q.dtype, device=q.device)
    cos_sin_cache = layer.cos_sin_cache
    block_h = min(ROTATED_HEADS, triton.next_power_of_2(heads))
    _rotate_kernel[(len(rows), triton.cdiv(heads, block_h))](
        q, rotated, rows, offsets, cos_sin_cache, q.stride(0), q.stride(1), cos_sin_cache.stride(0),
        HEADS=heads, HEAD_DIM=head_dim, ROTARY_DIM=cos_sin_cache.shape[1], IS_NEOX=layer.is_neox,
        BLOCK_H=block_h, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=ROTATE_WARPS,
    )  # fmt: skip
    return rotated


@jit
def _merge_kernel(
    partial_out, partial_lse, first, parts, out, lse, stride_out_row, stride_out_head, stride_lse_row,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """out[row, head] and its natural-log lse from the partial rows parts[first[row] .. first[row + 1]].

    Without parts, they are the partial rows first[row] .. first[row + 1] themselves. partial_lse is base 2.
    """
    row, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.zeros([], tl.float32)
    last = tl.load(first + row + 1)
    for start in range(tl.load(first + row), last, BLOCK_S):
        at = start + tl.arange(0, BLOCK_S)
        part = at if parts is None else tl.load(parts + at, mask=at < last, other=0)
        part = part.to(tl.int64) * heads + head
        part_lse = tl.load(partial_lse + part, mask=at < last, other=float("-inf"))
        mask = (at < last)[:, None] & (dim < HEAD_DIM)[None, :]
        value = tl.load(partial_out + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
        acc, row_max, row_sum = merge_step(value, part_lse, acc, row_max, row_sum)
    result, result_lse = merged(acc, row_max, row_sum)
    target = out + row * stride_out_row + head * stride_out_head
    tl.store(target + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    if lse is not None:
        tl.store(lse + row * stride_lse_row + head, result_lse)


def merge(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    first: torch.Tensor,
    parts: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    at_once: int,
) -> None:
    """Merge FlashInfer's partial rows, at_once at a time, into out, and into lse if given; see `_merge_kernel`."""
    rows, heads, head_dim = out.shape
    _merge_kernel[(rows, heads)](
        partial_out, partial_lse, first, parts, out, lse,
        out.stride(0), out.stride(1), lse.stride(0) if lse is not None else 0,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_S=at_once, num_warps=1,
    )  # fmt: skip

"""Decode on FlashInfer: an item per piece of a segment, listed on the device, so planning costs one launch."""

import dataclasses

import torch
import triton
import triton.language as tl

from benchmark.kernels.flashinfer.common import Kernel, check_supported, merge, rotate
from sgl_kernel_lazy.device import num_sms
from sgl_kernel_lazy.layer import Layer, check_queries
from sgl_kernel_lazy.rows import Rows
from sgl_kernel_lazy.triton.common import jit

# Pieces of a short batch per SM and kv head, and the least number of tokens in a piece.
FILL, MIN_PIECE = 2, 128
MERGED = 32


@dataclasses.dataclass
class Items:
    """The work items of batches of one size, on the device, and FlashInfer's plan, which is valid for all of them.

    Item i is one query row over kv_indices[kv_indptr[i] : kv_indptr[i + 1]]; those of request b are first[b] ..
    first[b + 1]. Unused items have no slots and row -1.
    """

    kv_indptr: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    first: torch.Tensor
    qo_indptr: torch.Tensor
    pieces: int
    kernel: Kernel | None = None


class Workspace:
    """Items and FlashInfer plans by batch size. A graph may be captured over them, and replayed after plan_decode."""

    def __init__(self, num_kv_heads: int, device: torch.device):
        self.pieces = max(1, FILL * num_sms(device) // num_kv_heads)
        self.device = device
        self.by_size: dict[tuple[int, int], Items] = {}
        self.planned: Items | None = None

    def fill_(self, value: float) -> "Workspace":
        """Do nothing: unlike the tensors of other implementations, it has no contents to fill."""
        return self

    def items(self, bs: int, max_segments: int) -> Items:
        if (bs, max_segments) not in self.by_size:
            count = bs * (max_segments + 1) + self.pieces

            def ints(n: int) -> torch.Tensor:
                return torch.zeros(n, dtype=torch.int32, device=self.device)

            qo_indptr = torch.arange(count + 1, dtype=torch.int32, device=self.device)
            self.by_size[bs, max_segments] = Items(
                ints(count + 1), ints(count), ints(count), ints(bs + 1), qo_indptr, self.pieces
            )
        return self.by_size[bs, max_segments]


@jit
def _items_kernel(
    kv_indptr, num_segments, segment_ends, segment_offsets, item_kv_indptr, item_rows, item_offsets, first,
    bs, width, pieces, count, stride_ends, stride_offsets,
    MIN_PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Cut every segment and every text into pieces of similar length, at most `pieces` more than there are segments."""
    i = tl.arange(0, BLOCK)
    b, s = i // (width + 1), i % (width + 1)
    within = b < bs
    segments = tl.load(num_segments + b, mask=within, other=0)
    row_begin = tl.load(kv_indptr + b, mask=within, other=0)
    row_end = tl.load(kv_indptr + b + 1, mask=within, other=0)
    is_chunk = within & (s < segments)
    begin = tl.load(segment_ends + b * stride_ends + s - 1, mask=within & (s > 0) & (s <= segments), other=0)
    end = tl.load(segment_ends + b * stride_ends + s, mask=is_chunk, other=0)
    end = tl.where(is_chunk, end, row_end - row_begin)
    length = tl.where(within & (s <= segments), end - begin, 0)
    offset = tl.load(segment_offsets + b * stride_offsets + s, mask=is_chunk, other=0)
    # The last piece of each segment is short: if there are few segments, as many pieces are reserved for these.
    wanted = tl.maximum(pieces - tl.sum((length > 0).to(tl.int32), 0), tl.cdiv(pieces, 2))
    size = tl.maximum(tl.cdiv(tl.sum(length, 0), wanted), MIN_PIECE)
    number = tl.cdiv(length, size)
    step = tl.cdiv(length, tl.maximum(number, 1))
    ends = tl.cumsum(number, 0)
    at = ends - number
    tl.store(first + b, at, mask=within & (s == 0))
    used = tl.max(ends, 0)
    for piece in range(0, tl.max(number, 0)):
        mask = piece < number
        tl.store(item_kv_indptr + at + piece, row_begin + begin + piece * step, mask=mask)
        tl.store(item_rows + at + piece, b, mask=mask)
        tl.store(item_offsets + at + piece, offset, mask=mask)
    total = tl.load(kv_indptr + bs)
    tl.store(first + bs, used)
    for start in range(used, count + 1, BLOCK):
        rest = start + i
        tl.store(item_kv_indptr + rest, tl.zeros([BLOCK], tl.int32) + total, mask=rest <= count)
        tl.store(item_rows + rest, tl.full([BLOCK], -1, tl.int32), mask=rest < count)


def decode_workspace(
    max_bs: int,
    max_segments: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> Workspace:
    """A workspace for `plan_decode` and `link_decode`; it grows with the batch sizes that are planned."""
    return Workspace(num_kv_heads, torch.device(device))


def plan_decode(
    workspace: Workspace,
    rows: Rows,
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """List a batch's items in the workspace, on the device: one launch per step, before all layers."""
    bs, width = rows.segment_ends.shape
    items = workspace.items(bs, width)
    _items_kernel[(1,)](
        rows.kv_indptr, rows.num_segments, rows.segment_ends, rows.segment_offsets,
        items.kv_indptr, items.rows, items.offsets, items.first,
        bs, width, items.pieces, len(items.rows), rows.segment_ends.stride(0), rows.segment_offsets.stride(0),
        MIN_PIECE=MIN_PIECE, BLOCK=max(64, triton.next_power_of_2(bs * (width + 1))), num_warps=8,
    )  # fmt: skip
    workspace.planned = items


def link_decode(
    q: torch.Tensor,
    layer: Layer,
    rows: Rows,
    *,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Same contract as `sgl_kernel_lazy.torch_impl.link_decode`, caches in fp16 or bf16, head_dim 64, 128 or 256.

    The first call for a batch size makes FlashInfer's plan, which copies from the host; later ones can be captured in a
    CUDA graph.
    """
    check_queries(q, layer, rows, out, lse)
    check_supported("link_decode", layer)
    num_qo_heads, num_kv_heads, head_dim = layer.dims
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if rows.bs == 0:
        return out
    if workspace is None:
        workspace = Workspace(num_kv_heads, q.device)
    if workspace.planned is None:
        plan_decode(workspace, rows, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    items = workspace.planned
    assert items is not None
    if items.kernel is None:
        # One tile per item of any length, so a plan made for lengths of 1 is valid for all.
        alike = torch.arange(len(items.rows) + 1, dtype=torch.int32)
        items.kernel = Kernel("fa2", q, num_kv_heads, alike, alike, causal=False, split=False)
    rotated = rotate(q, items.rows, items.offsets, layer)
    partial_out = torch.empty_like(rotated)
    partial_lse = torch.empty(rotated.shape[:2], dtype=torch.float32, device=q.device)
    items.kernel.run(
        rotated, layer.k_cache, layer.v_cache, items.qo_indptr, items.kv_indptr, rows.kv_indices.to(torch.int32),
        partial_out, partial_lse, layer.sm_scale,
    )  # fmt: skip
    merge(partial_out, partial_lse, items.first, None, out, lse, at_once=MERGED)
    return out

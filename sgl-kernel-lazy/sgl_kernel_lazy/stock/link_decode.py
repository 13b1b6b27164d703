"""Decode on stock FlashInfer: an entry per piece of a segment, listed on the device, so planning costs one launch."""

import dataclasses

import torch
import triton
import triton.language as tl

from sgl_kernel_lazy.stock.common import Kernel, check_supported, merge, rotate
from sgl_kernel_lazy.triton.common import jit, num_multiprocessors
from sgl_kernel_lazy.validation import check_link_inputs, check_rows

# Pieces of a short batch per multiprocessor and kv head, and the fewest tokens that a piece is worth.
FILL, MIN_PIECE = 2, 128
MERGED = 32


@dataclasses.dataclass
class Entries:
    """The entries of batches of one size, on the device, and FlashInfer's plan, which holds for all of them.

    Entry i is one query row over kv_indices[kv_indptr[i] : kv_indptr[i + 1]]; those of request b are first[b] ..
    first[b + 1]. Entries beyond the last have no slots, and -1 for a row.
    """

    kv_indptr: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    first: torch.Tensor
    qo_indptr: torch.Tensor
    pieces: int
    kernel: Kernel | None = None


class Workspace:
    """Entries and FlashInfer plans by batch size. A graph may be captured over them, and replayed after plan_decode."""

    def __init__(self, num_kv_heads: int, device: torch.device):
        self.pieces = max(1, FILL * num_multiprocessors(device) // num_kv_heads)
        self.device = device
        self.by_size = {}
        self.planned = None

    def fill_(self, value):
        """Nothing here has contents that the caller may set."""
        return self

    def entries(self, bs: int, max_segments: int) -> Entries:
        if (bs, max_segments) not in self.by_size:
            count = bs * (max_segments + 1) + self.pieces

            def ints(n):
                return torch.zeros(n, dtype=torch.int32, device=self.device)

            qo_indptr = torch.arange(count + 1, dtype=torch.int32, device=self.device)
            self.by_size[bs, max_segments] = Entries(
                ints(count + 1), ints(count), ints(count), ints(bs + 1), qo_indptr, self.pieces
            )
        return self.by_size[bs, max_segments]


@jit
def _entries_kernel(
    kv_indptr, num_segments, segment_ends, segment_offsets, entry_kv_indptr, entry_rows, entry_offsets, first,
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
    # Every segment's last piece is short: where segments are few, that many pieces are kept for it.
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
        tl.store(entry_kv_indptr + at + piece, row_begin + begin + piece * step, mask=mask)
        tl.store(entry_rows + at + piece, b, mask=mask)
        tl.store(entry_offsets + at + piece, offset, mask=mask)
    total = tl.load(kv_indptr + bs)
    tl.store(first + bs, used)
    for start in range(used, count + 1, BLOCK):
        rest = start + i
        tl.store(entry_kv_indptr + rest, tl.zeros([BLOCK], tl.int32) + total, mask=rest <= count)
        tl.store(entry_rows + rest, tl.full([BLOCK], -1, tl.int32), mask=rest < count)


def decode_workspace(max_bs, max_segments, num_qo_heads, num_kv_heads, head_dim, device) -> Workspace:
    """A workspace for `plan_decode` and `link_decode`; what it holds grows with the batch sizes that are planned."""
    return Workspace(num_kv_heads, torch.device(device))


def plan_decode(
    workspace, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids,
    *, num_qo_heads, num_kv_heads, head_dim,
):  # fmt: skip
    """List a batch's entries in the workspace, on the device: one launch per step, before all layers."""
    check_rows(kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids, num_segments.device)
    bs, width = segment_ends.shape
    entries = workspace.entries(bs, width)
    _entries_kernel[(1,)](
        kv_indptr, num_segments, segment_ends, segment_offsets,
        entries.kv_indptr, entries.rows, entries.offsets, entries.first,
        bs, width, entries.pieces, len(entries.rows), segment_ends.stride(0), segment_offsets.stride(0),
        MIN_PIECE=MIN_PIECE, BLOCK=max(64, triton.next_power_of_2(bs * (width + 1))), num_warps=8,
    )  # fmt: skip
    workspace.planned = entries


def link_decode(
    q, k_cache, v_cache, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, cos_sin_cache,
    *, is_neox, sm_scale, v_scale=1.0, segment_ids=None, workspace=None, out=None, lse=None,
):  # fmt: skip
    """Same contract as `sgl_kernel_lazy.torch_impl.link_decode`, caches in fp16 or bf16, head_dim 64, 128 or 256.

    workspace: from `decode_workspace`, with this batch planned by `plan_decode`; planned here when not. The first call
        for a batch size makes FlashInfer's plan, which copies from the host; later ones can be captured in a graph.
    """
    check_link_inputs(
        q, k_cache, v_cache, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, cos_sin_cache,
        out, lse, sm_scale, v_scale, kv_dtypes=(), segment_ids=segment_ids,
    )  # fmt: skip
    check_supported(q)
    bs, num_qo_heads, head_dim = q.shape
    if bs != num_segments.shape[0]:
        raise ValueError(f"q: expected {num_segments.shape[0]} rows, one per request, got {bs}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if bs == 0:
        return out
    num_kv_heads = k_cache.shape[1]
    if workspace is None:
        workspace = Workspace(num_kv_heads, q.device)
    if workspace.planned is None:
        plan_decode(
            workspace, kv_indptr, kv_indices, num_segments, segment_ends, segment_offsets, segment_ids,
            num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        )  # fmt: skip
    entries = workspace.planned
    if entries.kernel is None:
        # A tile per entry whatever its length, so the plan made of lengths 1 serves them all.
        alike = torch.arange(len(entries.rows) + 1, dtype=torch.int32)
        entries.kernel = Kernel("fa2", q, num_kv_heads, alike, alike, causal=False, split=False)
    turned = rotate(q, entries.rows, entries.offsets, cos_sin_cache, is_neox)
    partial_out = torch.empty_like(turned)
    partial_lse = torch.empty(turned.shape[:2], dtype=torch.float32, device=q.device)
    entries.kernel.run(
        turned, k_cache, v_cache, entries.qo_indptr, entries.kv_indptr, kv_indices.to(torch.int32),
        partial_out, partial_lse, sm_scale,
    )  # fmt: skip
    merge(partial_out, partial_lse, entries.first, None, out, lse, at_once=MERGED)
    return out

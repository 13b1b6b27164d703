"""Copies of scattered rows of bytes between buffers on the device and in pinned host memory, by few thread blocks."""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK_BYTES, NUM_WARPS = 1 << 16, 32
"""What a thread block has under way: host memory answers late, and few blocks must ask for much at once."""
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# One kernel for all calls: a part of a table of addresses begins anywhere.
_ANYWHERE = ["sources", "targets", "source_rows", "target_rows"]


@triton.jit(do_not_specialize=["num_rows", "num_buffers"], do_not_specialize_on_alignment=_ANYWHERE)
def _copy_rows_kernel(
    sources, targets, source_rows, target_rows, num_rows, num_buffers,
    WORD: tl.constexpr, ROW: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """targets[b][target_rows] = sources[b][source_rows] for every buffer b, in rows of ROW words."""
    num_blocks = tl.cdiv(num_rows, BLOCK_T)
    word = tl.arange(0, BLOCK_W)
    for item in range(tl.program_id(0), num_blocks * num_buffers, tl.num_programs(0)):
        buffer = item // num_blocks
        row = item % num_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
        known = row < num_rows
        read = tl.load(source_rows + row, mask=known, other=0)[:, None] * ROW + word[None, :]
        write = tl.load(target_rows + row, mask=known, other=0)[:, None] * ROW + word[None, :]
        # Must be known to the compiler, which matters only for rows of multiples of 16 bytes: these it copies by 16.
        source = tl.multiple_of(tl.load(sources + buffer).to(tl.pointer_type(WORD)), 16)
        target = tl.multiple_of(tl.load(targets + buffer).to(tl.pointer_type(WORD)), 16)
        mask = known[:, None] & (word < ROW)[None, :]
        values = tl.load(source + read, mask=mask, eviction_policy="evict_first")
        tl.store(target + write, values, mask=mask, eviction_policy="evict_first")


def copy_rows(
    sources: torch.Tensor,
    targets: torch.Tensor,
    source_rows: torch.Tensor,
    target_rows: torch.Tensor,
    row_bytes: int,
    num_blocks: int,
) -> None:
    """Copy the same rows of many buffers: targets[b][target_rows[i]] = sources[b][source_rows[i]], on the current
    stream.

    sources, targets: [buffers] int64, addresses of contiguous buffers that the device can access: its own memory or
        pinned memory of the host. Multiples of the largest power of two, up to 16, that divides row_bytes.
    source_rows, target_rows: [n] int64; each target once. Nothing may be both read and written.
    row_bytes: bytes of a row in all these buffers.
    num_blocks: thread blocks, each of which occupies one multiprocessor or less.

    All tensors are on the device.
    """
    if not len(source_rows):
        return
    _copy_rows_kernel[(num_blocks,)](
        sources,
        targets,
        source_rows,
        target_rows,
        len(source_rows),
        len(sources),
        **layout(row_bytes),
        num_warps=NUM_WARPS,
    )


def layout(row_bytes: int) -> dict[str, Any]:
    """The constants of the kernel for rows of this many bytes."""
    word_bytes = next(size for size in WORDS if row_bytes % size == 0)
    row = row_bytes // word_bytes
    block_w = triton.next_power_of_2(row)
    block_t = max(1, BLOCK_BYTES // (block_w * word_bytes))
    return dict(WORD=WORDS[word_bytes], ROW=row, BLOCK_T=block_t, BLOCK_W=block_w)

"""A kernel that reads a large tensor and writes little, to measure the memory's read bandwidth."""

import torch
import triton
import triton.language as tl

BLOCK, BLOCKS = 8192, 16


@triton.jit
def _read_kernel(source, sums, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * BLOCK * BLOCKS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(BLOCKS):
        total += tl.load(source + at + i * BLOCK)
    tl.store(sums + program, tl.sum(total, 0))


def read(source: torch.Tensor, sums: torch.Tensor) -> None:
    """Sum float32 source, whose length is a multiple of BLOCK * BLOCKS, piece by piece into the start of sums."""
    _read_kernel[(source.numel() // (BLOCK * BLOCKS),)](source, sums, BLOCK=BLOCK, BLOCKS=BLOCKS, num_warps=8)

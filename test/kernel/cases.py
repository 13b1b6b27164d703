"""The cases that every implementation of both ops must pass, and which implementations can run here."""

from collections.abc import Collection

import pytest
import torch
from ragged import DEVICE, Shape

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

# name: (seed, Shape, layout or None for a random one)
CASES = {
    "ragged": (0, Shape(), None),
    "mha": (1, Shape(num_qo_heads=3, num_kv_heads=3, head_dim=32, rotary_dim=32), None),
    "group of 3": (2, Shape(num_qo_heads=6, num_kv_heads=2, head_dim=80, rotary_dim=20), None),
    "group of 7, interleaved": (3, Shape(num_qo_heads=7, num_kv_heads=1, is_neox=False), None),
    "group of 20": (4, Shape(num_qo_heads=20, num_kv_heads=1, head_dim=32, rotary_dim=16, bs=2), None),
    "head_dim 96": (5, Shape(num_qo_heads=8, num_kv_heads=2, head_dim=96, rotary_dim=96), None),
    "head_dim 128": (6, Shape(num_qo_heads=8, num_kv_heads=1, head_dim=128, rotary_dim=128), None),
    "head_dim 192, partial": (7, Shape(num_qo_heads=4, num_kv_heads=1, head_dim=192, rotary_dim=64, bs=2), None),
    "head_dim 256, interleaved": (8, Shape(head_dim=256, rotary_dim=64, is_neox=False, bs=2), None),
    "head_dim 512": (24, Shape(num_qo_heads=8, num_kv_heads=1, head_dim=512, rotary_dim=512, bs=2), None),
    "long chunks": (9, Shape(max_chunk_len=300, max_segments=3, max_text_len=70, bs=2), None),
    "many requests": (10, Shape(num_qo_heads=2, num_kv_heads=1, bs=9, max_segments=2), None),
    "50 segments": (11, Shape(max_segments=50, bs=1), [[("chunk", i % 4) for i in range(50)] + [("new", 3)]]),
    "50 segments, spans between": (
        12, Shape(bs=1), [[part for i in range(25) for part in (("chunk", i % 4), ("new", i % 3))] + [("new", 1)]],
    ),
    "segments of one token": (13, Shape(bs=1), [[("chunk", 0), ("chunk", 0), ("text", 1), ("chunk", 0), ("new", 1)]]),
    "same chunk twice": (14, Shape(bs=1), [[("chunk", 2), ("text", 5), ("chunk", 2), ("new", 4)]]),
    "plain requests": (15, Shape(bs=3), [[("new", 70)], [("text", 130), ("new", 9)], [("new", 1)]]),
    "plain beside linked": (16, Shape(bs=2), [[("text", 65), ("new", 33)], [("chunk", 2), ("new", 2)]]),
    "empty rows": (17, Shape(bs=4), [[], [("chunk", 1), ("new", 2)], [], []]),
    "offsets to the end": (
        18, Shape(bs=1), [[("chunk", 1), ("gap", 1960), ("chunk", 0), ("new", 2), ("chunk", 0), ("new", 1)]],
    ),
    "chunked prefill goes on": (
        19,
        Shape(bs=2),
        [
            [("text", 3), ("chunk", 1), ("text", 2), ("chunk", 2), ("text", 9), ("new", 21)],
            [("text", 64), ("new", 64)],
        ],
    ),
    "cached text behind new text": (
        20, Shape(bs=1), [[("new", 4), ("chunk", 1), ("text", 6), ("chunk", 0), ("new", 5)]],
    ),
    "chunks with holes": (
        22,
        Shape(bs=2),
        [
            [("chunk", (2, (0, 1, 2, 5, 9, 39))), ("text", 3), ("chunk", (2, (7, 8))), ("new", 4)],
            [("text", 1), ("chunk", (2, (0, 3, 4, 5, 20, 39))), ("new", 2), ("chunk", (2, (7, 8))), ("new", 1)],
        ],
    ),
    "behind a preamble": (
        23,
        Shape(bs=2, rotary_dim=40, preamble=50),
        [[("chunk", 2), ("text", 10), ("chunk", 1), ("new", 3), ("chunk", (2, (7, 8, 30))), ("new", 2)], [("new", 3)]],
    ),
    "nothing cached is seen": (21, Shape(bs=1), [[("new", 5), ("chunk", 2), ("chunk", 1), ("new", 1)]]),
}  # fmt: skip

# fp16 exercises every cast under the interpreter, fp32 all of the logic.
INTERPRETED_IN_FP16 = ("group of 7, interleaved", "chunked prefill goes on")

all_cases = pytest.mark.parametrize("case", CASES)
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def skip_unless_supported(
    name: str, dtype: torch.dtype, case: str, in_fp16: Collection[str] = INTERPRETED_IN_FP16
) -> None:
    """Skip what this machine cannot run, with the reason."""
    if name != "triton" or DEVICE != "cpu":
        return
    if dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bf16 in tl.dot; bf16 runs on a GPU only")
    if dtype == torch.float16 and case not in in_fp16:
        pytest.skip("the interpreter is slow: without a GPU fp16 runs a few of the cases")

"""Positions with three axes (M-RoPE), and images, in batches that mix linked and ordinary rows."""

from types import SimpleNamespace

import numpy as np
import torch

from sglang_lazy.attention.rows import AttentionRow, LinkedBatch
from sglang_lazy.core.prompt import Images
from sglang_lazy.port.cache.composite import order_images
from sglang_lazy.port.model.model_runner import init_new


def test_rows_set_positions_of_text_only():
    """A linked row of two new tokens, then a request with an image, whose positions are SGLang's."""
    rows = [
        AttentionRow(0, [(0, 4)], np.array([2, 3, 0, 9], dtype=np.int32), 2, ordinary=False),
        AttentionRow(1, [(0, 3)], np.array([0, 1, 2], dtype=np.int32), 3, ordinary=True),
    ]
    table = SimpleNamespace(current=LinkedBatch(rows, [0]))
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(segment_table=table))
    shown = SimpleNamespace(
        mrope_positions=torch.tensor([[0, 1], [0, 1], [0, 2]]), mrope_position_delta=torch.tensor([[1]])
    )
    batch = SimpleNamespace(multimodal_inputs=[None, shown])
    forward_batch = SimpleNamespace(positions=torch.tensor([2, 3, 0, 1, 2]), mrope_positions=torch.zeros(3, 5))
    init_new(forward_batch, None, batch, runner)
    assert forward_batch.positions.tolist() == [0, 9, 0, 1, 2]
    # The last token was generated after a prompt of two
    assert forward_batch.mrope_positions.tolist() == [[0, 9, 0, 1, 3], [0, 9, 0, 1, 3], [0, 9, 0, 2, 3]]


def test_image_offsets_follow_the_row():
    """The row's order: text 4 of the prompt, the second image (5 to 6), text 0, the first image (1 to 3)."""
    first, second = SimpleNamespace(offsets=[(1, 3)]), SimpleNamespace(offsets=[(5, 6)])
    inputs = SimpleNamespace(mm_items=[first, second])
    images = Images([first, second], [(1, 4), (5, 7)], [b"", b""], np.arange(7))
    order_images(inputs, images, SimpleNamespace(positions=np.array([4, 5, 6, 0, 1, 2, 3])))
    assert inputs.mm_items == [second, first]
    assert (second.offsets, first.offsets) == ([(1, 2)], [(4, 6)])
    order_images(inputs, images, SimpleNamespace(positions=np.arange(7)))
    assert inputs.mm_items == [first, second]
    assert (first.offsets, second.offsets) == ([(1, 3)], [(5, 6)])

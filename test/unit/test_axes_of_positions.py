"""Positions of three axes in a batch of linked rows and ordinary ones."""

from types import SimpleNamespace

import numpy as np
import torch

from sglang_lazy.attention.rows import AttentionRow, LinkedBatch
from sglang_lazy.port.model_runner import init_new


def test_only_text_is_placed_by_its_row():
    """A linked row of two new tokens, and behind it a request that shows an image, whose places are SGLang's."""
    rows = [
        AttentionRow(0, [(0, 4)], np.array([2, 3, 0, 9], dtype=np.int32), 2, ordinary=False),
        AttentionRow(1, [(0, 3)], np.array([0, 1, 2], dtype=np.int32), 3, ordinary=True),
    ]
    table = SimpleNamespace(current=LinkedBatch(rows, [0]))
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(segment_table=table))
    batch = SimpleNamespace(multimodal_inputs=[None, object()])
    placed = torch.tensor([[2, 3, 0, 1, 1], [2, 3, 0, 1, 1], [2, 3, 0, 1, 2]])
    forward_batch = SimpleNamespace(positions=torch.tensor([2, 3, 0, 1, 2]), mrope_positions=placed)
    init_new(forward_batch, None, batch, runner)
    assert forward_batch.positions.tolist() == [0, 9, 0, 1, 2]
    assert forward_batch.mrope_positions.tolist() == [[0, 9, 0, 1, 1], [0, 9, 0, 1, 1], [0, 9, 0, 1, 2]]

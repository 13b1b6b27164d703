"""Images in prompts with chunks: their embeddings and positions in the row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_lazy.attention.rows import AttentionRow
from sglang_lazy.core.device import to_device
from sglang_lazy.core.prompt import Images
from sglang_lazy.core.row_order import Row


def place_rows(forward_batch: Any, batch: Any, rows: Sequence[AttentionRow]) -> None:
    """Set the multi-axis positions of a prefill batch whose rows are permuted.

    Text has the same position on all axes, unless images precede it; then SGLang has listed the axes' positions by
    position in the prompt.
    """
    inputs_of = batch.multimodal_inputs
    places = [places_of(inputs_of[row.request], row.positions[row.prefix_len :]) for row in rows]
    forward_batch.mrope_positions = to_device(torch.cat(places, 1).numpy(), forward_batch.positions.device)


def places_of(inputs: Any, positions: np.ndarray) -> torch.Tensor:
    """The positions on all axes of tokens at `positions`, int64 [3, n], even after the prompt's end.

    inputs: SGLang's, of their request; None without images.
    """
    index = torch.from_numpy(positions).long()
    if inputs is None:
        return index.expand(3, -1)
    listed = inputs.mrope_positions.to(index)
    last = listed.shape[1] - 1
    return torch.where(index <= last, listed[:, index.clamp(max=last)], index + inputs.mrope_position_delta.item())


def order_images(inputs: Any, images: Images, row: Row) -> None:
    """Set the offsets and order of the images in SGLang's `inputs` of a request to those in its row, by which SGLang
    finds them. Each image is contiguous in the row, see `RowCache`."""
    places = np.argsort(row.positions)
    for item, (start, end) in zip(images.items, images.ranges, strict=True):
        item.offsets = [(int(places[start]), int(places[end - 1]))]
    inputs.mm_items.sort(key=lambda item: item.offsets[0])

"""What the PyTorch implementation checks for all others."""

import pytest
import torch
from ragged import Shape, random_batch, run

from sgl_kernel_lazy import torch_impl

LAYOUT = [("gap", 3), ("chunk", 1), ("chunk", 2), ("text", 5), ("new", 6)]


@pytest.mark.parametrize("part", ["segment", "cached text", "new text"])
def test_positions_ascend_in_each_part_of_a_row(part):
    batch = random_batch(0, Shape(bs=1), [LAYOUT])
    positions, end = batch.extend["kv_positions"], int(batch.extend["kv_indptr"][-1])
    first = {"segment": 0, "cached text": end - 11, "new text": end - 6}[part]
    if first:  # a part may begin below the one before it
        positions[first:end] -= positions[first].item()
        run("extend", torch_impl, batch)
    positions[first + 1] = positions[first]
    with pytest.raises(ValueError, match=f"kv_positions: expected to ascend .* at {first + 1}$"):
        run("extend", torch_impl, batch)


def test_no_row_has_more_queries_than_it_says():
    batch = random_batch(0, Shape(bs=2), [LAYOUT, LAYOUT[:-1] + [("new", 2)]])
    torch_impl.link_extend(**batch.extend, **batch.options, max_extend_len=6)
    with pytest.raises(ValueError, match="max_extend_len: expected the longest qo_len, 6, or more, got 5"):
        torch_impl.link_extend(**batch.extend, **batch.options, max_extend_len=5)


def test_segments_of_one_id_list_the_same_slots():
    ints = dict(dtype=torch.int32)
    rows = dict(
        kv_indptr=torch.tensor([0, 5, 10, 12], **ints),
        kv_indices=torch.tensor([7, 8, 9, 1, 2, 7, 8, 9, 3, 4, 7, 8], **ints),
        num_segments=torch.tensor([2, 1, 1], **ints),
        segment_ends=torch.tensor([[3, 4], [3, 0], [2, 0]], **ints),
        segment_offsets=torch.zeros(3, 2, **ints),
    )
    dims = dict(num_qo_heads=2, num_kv_heads=1, head_dim=64)

    def plan(ids):
        torch_impl.plan_decode(None, **rows, segment_ids=torch.tensor(ids, **ints), **dims)

    plan([[4, -1], [4, 9], [4, 9]])  # the last row's segment is all of it, so it is shared with nobody
    plan([[-1, 4], [-1, 4], [-1, 4]])
    for ids in ([[4, 4], [-1, -1], [-1, -1]], [[-1, 4], [4, -1], [-1, -1]]):
        with pytest.raises(ValueError, match="segment_ids: expected the same slots in all segments of id 4"):
            plan(ids)

"""What is checked on a CPU for all implementations: contents of rows, and of what ops read."""

import pytest
import torch
from ragged import DEVICE, Shape, packed, random_batch, run

from sgl_kernel_lazy import torch_impl
from sgl_kernel_lazy.caches import Caches
from sgl_kernel_lazy.rows import Rows

LAYOUT = [("gap", 3), ("chunk", 1), ("chunk", 2), ("text", 5), ("new", 6)]
DIMS = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64)

if DEVICE != "cpu":
    pytest.skip("what rows contain is checked on a CPU only", allow_module_level=True)


def two_rows():
    return random_batch(0, Shape(bs=2), [LAYOUT, LAYOUT])


def accumulate(batch):
    arguments = {"sums": torch.zeros(199, device=DEVICE), **batch.extend}
    torch_impl.accumulate_attention(**packed(**arguments, **batch.options, max_extend_len=batch.max_extend_len))


OPS = {
    "decode": lambda batch: run("decode", torch_impl, batch),
    "decode without a plan": lambda batch: torch_impl.link_decode(**packed(**batch.decode, **batch.options)),
    "extend": lambda batch: run("extend", torch_impl, batch),
    "accumulate": accumulate,
}
all_ops = pytest.mark.parametrize("op", OPS)


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


@pytest.mark.parametrize("op", ["extend", "accumulate"])
def test_no_row_has_more_queries_than_it_says(op, monkeypatch):
    batch = random_batch(0, Shape(bs=2), [LAYOUT, LAYOUT[:-1] + [("new", 2)]])
    OPS[op](batch)
    monkeypatch.setattr(type(batch), "max_extend_len", 5)
    with pytest.raises(ValueError, match="max_extend_len: expected the longest qo_len, 6, or more, got 5"):
        OPS[op](batch)


@all_ops
@pytest.mark.parametrize("slot", [-1, "the cache's size"])
def test_slots_lie_within_the_cache(slot, op):
    batch = two_rows()
    num_slots, end = len(batch.extend["k_cache"]), int(batch.extend["kv_indptr"][2])
    slot = slot if slot == -1 else num_slots
    batch.extend["kv_indices"][end - 1] = slot
    with pytest.raises(ValueError, match=f"kv_indices: expected slots from 0 to {num_slots - 1}, got {slot} in row 1"):
        OPS[op](batch)


@all_ops
@pytest.mark.parametrize("offset", [-1, "the table's size"])
def test_offsets_lie_within_the_table_of_angles(offset, op):
    batch = two_rows()
    num_rotations = len(batch.extend["cos_sin_cache"])
    batch.extend["segment_offsets"][1, 0] = offset if offset == -1 else num_rotations
    with pytest.raises(ValueError, match=f"segment_offsets: expected rows from 0 to {num_rotations - 1}, .* in row 1"):
        OPS[op](batch)


@all_ops
@pytest.mark.parametrize("ends", [(-1, 41), (41, 40)], ids=str)
def test_segments_are_in_order(ends, op):
    batch = two_rows()
    batch.extend["segment_ends"][1, :2] = torch.tensor(ends)
    with pytest.raises(ValueError, match="segment_ends: expected to ascend from 0, got others in row 1"):
        OPS[op](batch)


@pytest.mark.parametrize("op", ["extend", "accumulate"])
def test_segments_end_within_their_row(op):
    """Else the next row's tokens would be read, and one whose position descends there would pass for a beginning."""
    batch = two_rows()
    end = int(batch.extend["kv_indptr"][1])
    batch.extend["segment_ends"][0, 1] = end + 2
    batch.extend["kv_positions"][end + 2] = 0
    with pytest.raises(ValueError, match="segment_ends: expected at most the row's length, got others in row 0"):
        OPS[op](batch)


@all_ops
@pytest.mark.parametrize("count", [-1, "more than the tables have"])
def test_tables_hold_all_segments(count, op):
    batch = two_rows()
    width = batch.extend["segment_ends"].shape[1]
    batch.extend["num_segments"][1] = count if count == -1 else width + 1
    with pytest.raises(ValueError, match=f"num_segments: expected 0 to {width}, got others in row 1"):
        OPS[op](batch)


@all_ops
@pytest.mark.parametrize("mistake", ["begins before 0", "descends"])
def test_rows_follow_one_another(mistake, op):
    batch = two_rows()
    if mistake == "descends":
        batch.extend["kv_indptr"][1] = batch.extend["kv_indptr"][2] + 1
    else:
        batch.extend["kv_indptr"][0] = -1
    with pytest.raises(ValueError, match="kv_indptr: expected to ascend from 0 to at most"):
        OPS[op](batch)


LISTS = [(op, "kv_indices") for op in OPS]
LISTS += [("extend", "kv_positions"), ("accumulate", "kv_positions")]


@pytest.mark.parametrize("op, name", LISTS)
def test_rows_lie_within_what_lists_their_tokens(op, name):
    batch = two_rows()
    num_kv = int(batch.extend["kv_indptr"][2])
    batch.extend[name] = batch.extend[name][:num_kv]
    OPS[op](batch)
    batch.extend[name] = batch.extend[name][:-1]
    with pytest.raises(ValueError, match=f"kv_indptr: expected to ascend from 0 to at most {num_kv - 1}, got "):
        OPS[op](batch)


def test_each_token_has_a_sum():
    batch = two_rows()
    num_kv = int(batch.extend["kv_indptr"][2])
    batch.extend["sums"] = torch.zeros(num_kv, device=DEVICE)
    accumulate(batch)
    batch.extend["sums"] = batch.extend["sums"][:-1]
    with pytest.raises(ValueError, match=f"sums: expected one for each of {num_kv} KV tokens, got {num_kv - 1}"):
        accumulate(batch)


@pytest.mark.parametrize("op", ["extend", "accumulate"])
def test_queries_lie_within_q(op):
    batch = two_rows()
    batch.extend["qo_indptr"][2] += 1
    with pytest.raises(ValueError, match="qo_indptr: expected to ascend from 0 to at most 12"):
        OPS[op](batch)


CHANGES = {
    "a row's beginning": lambda batch: batch.extend["kv_indptr"][1:2].sub_(1),
    "a slot": lambda batch: batch.extend["kv_indices"][:2].copy_(batch.extend["kv_indices"][:2].flip(0)),
    "a number of segments": lambda batch: batch.extend["num_segments"][1:].sub_(1),
    "a segment's end": lambda batch: batch.extend["segment_ends"][0, :1].sub_(1),
    "a segment's offset": lambda batch: batch.extend["segment_offsets"][0, :1].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_for_one_batch(change):
    batch = two_rows()
    workspace = torch_impl.decode_workspace(2, 4, **DIMS, device=DEVICE)
    torch_impl.plan_decode(workspace, batch.decode_rows, **DIMS)
    torch_impl.link_decode(**packed(**batch.decode, **batch.options, workspace=workspace))
    CHANGES[change](batch)
    torch_impl.link_decode(**packed(**batch.decode, **batch.options))
    with pytest.raises(ValueError, match="workspace: expected the plan of this batch, got that of another"):
        torch_impl.link_decode(**packed(**batch.decode, **batch.options, workspace=workspace))


def test_a_plan_is_for_one_number_of_heads():
    batch = two_rows()
    workspace = torch_impl.decode_workspace(2, 4, **DIMS, device=DEVICE)
    torch_impl.plan_decode(workspace, batch.decode_rows, **DIMS | dict(num_kv_heads=1))
    with pytest.raises(ValueError, match="workspace: expected the plan of this batch, got that of another"):
        torch_impl.link_decode(**packed(**batch.decode, **batch.options, workspace=workspace))


# source, target, offsets and what is wrong, with 9 slots and 5 rows of angles
COPIES = [
    ([-1, 2], [3, 4], [0, 0], "source: expected 0 to 8, got -1 at 0"),
    ([1, 2], [3, 9], [0, 0], "target: expected 0 to 8, got 9 at 1"),
    ([1, 2], [3, 4], [0, -1], "offsets: expected 0 to 4, got -1 at 1"),
    ([1, 2], [3, 4], [0, 5], "offsets: expected 0 to 4, got 5 at 1"),
    ([1, 2], [3, 3], [0, 0], "target: expected each slot once, got one twice"),
    ([1, 3], [3, 4], [0, 0], "source: expected slots that are not in target, too, got 3"),
    ([3, 3], [3, 4], [0, 0], "source: expected slots that are not in target, too, got 3"),
]


@pytest.mark.parametrize("source, target, offsets, message", COPIES, ids=[message for *_, message in COPIES])
def test_copies_do_not_depend_on_one_another(source, target, offsets, message):
    cache, table = torch.zeros(9, 1, 64), torch.ones(5, 64)
    with pytest.raises(ValueError, match=message):
        lists = (torch.tensor(values) for values in (source, target, offsets))
        caches = Caches(k_caches=[cache], v_caches=[cache.clone()], cos_sin_cache=table, is_neox=True)
        torch_impl.copy_rotated(caches, *lists)


def test_segments_of_one_id_list_the_same_slots():
    ints = dict(dtype=torch.int32)
    rows = dict(
        kv_indptr=torch.tensor([0, 5, 10, 12], **ints),
        kv_indices=torch.tensor([7, 8, 9, 1, 2, 7, 8, 9, 3, 4, 7, 8], **ints),
        num_segments=torch.tensor([2, 1, 1], **ints),
        segment_ends=torch.tensor([[3, 4], [3, 0], [2, 0]], **ints),
        segment_offsets=torch.zeros(3, 2, **ints),
    )

    def of(ids):
        Rows(**rows, segment_ids=torch.tensor(ids, **ints))

    of([[4, -1], [4, 9], [4, 9]])  # the last row's segment is all of it, so it is shared with nobody
    of([[-1, 4], [-1, 4], [-1, 4]])
    for ids in ([[4, 4], [-1, -1], [-1, -1]], [[-1, 4], [4, -1], [-1, -1]]):
        with pytest.raises(ValueError, match="segment_ids: expected the same slots in all segments of id 4"):
            of(ids)

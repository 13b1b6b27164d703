"""Preconditions of single ops that implementations on GPUs rely on but do not check, since they would have to wait for
the device. The PyTorch implementation checks them, so every test on a CPU does. Those of all ops: `Rows`."""

import bisect
import zlib

import torch

from sgl_kernel_lazy.layer import Layer
from sgl_kernel_lazy.rows import ExtendRows, Rows
from sgl_kernel_lazy.states import StateRows
from sgl_kernel_lazy.validation import check_indptr, refuse


def check_reads(rows: Rows, layer: Layer) -> None:
    """Check that slots lie within the cache, and offsets within the table of angles."""
    num_slots, num_rotations = len(layer.k_cache), len(layer.cos_sin_cache)
    indptr = rows.kv_indptr.tolist()
    slots = rows.kv_indices[indptr[0] : indptr[-1]]
    if (place := _first_outside(slots, num_slots)) is not None:
        row = bisect.bisect_right(indptr, indptr[0] + place) - 1
        raise ValueError(f"kv_indices: expected slots from 0 to {num_slots - 1}, got {slots[place]} in row {row}")
    outside = (rows.segment_offsets < 0) | (rows.segment_offsets >= num_rotations)
    refuse(rows.used() & outside, f"segment_offsets: expected rows from 0 to {num_rotations - 1}")


def check_positions(rows: ExtendRows) -> None:
    """Check that positions ascend strictly within each segment, the cached text and the new text of each row, which is
    as long as it has queries; see `link_extend`."""
    ends = (rows.kv_indptr[:-1, None] + rows.segment_ends)[rows.used()]
    starts = torch.cat([rows.kv_indptr, rows.kv_indptr[1:] - rows.qo_indptr.diff(), ends])
    descents = (rows.kv_positions[: rows.kv_indptr[-1]].diff() <= 0).nonzero()[:, 0] + 1
    wrong = descents[~torch.isin(descents, starts)]
    if len(wrong):
        raise ValueError(f"kv_positions: expected to ascend in each part of a row, got a lower one at {wrong[0]}")


def check_sums(sums: torch.Tensor, rows: Rows) -> None:
    """Check that there is a sum for each KV token; see `accumulate_attention`."""
    if len(sums) < (num_kv := int(rows.kv_indptr[-1])):
        raise ValueError(f"sums: expected one for each of {num_kv} KV tokens, got {len(sums)}")


def fingerprint(rows: Rows, dims: tuple[int, int, int]) -> int:
    """32 bits that tell one planned batch from another.  dims: num_qo_heads, num_kv_heads, head_dim."""
    used, num_kv = rows.used(), rows.kv_indptr[-1]
    tables = (rows.segment_ends[used], rows.segment_offsets[used])
    parts = (rows.kv_indptr, rows.kv_indices[:num_kv], rows.num_segments, *tables)
    values = torch.cat([part.int() for part in parts]).cpu()
    return zlib.crc32(values.numpy(), zlib.crc32(repr(dims).encode()))


def check_copied_slots(
    source: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor, num_slots: int, num_rotations: int
) -> None:
    """Check that slots and offsets are in range, and that no copy depends on another. Arguments and errors:
    `copy_rotated`."""
    for name, values, size in (
        ("source", source, num_slots), ("target", target, num_slots), ("offsets", offsets, num_rotations)
    ):  # fmt: skip
        if (place := _first_outside(values, size)) is not None:
            raise ValueError(f"{name}: expected 0 to {size - 1}, got {values[place]} at {place}")
    if len(target.unique()) < len(target):
        raise ValueError("target: expected each slot once, got one twice")
    moved = source[source != target]
    if (both := torch.isin(moved, target)).any():
        raise ValueError(f"source: expected slots that are not in target, too, got {moved[both][0]}")


def check_parts(rows: StateRows, num_states: int, num_chunks: int, num_pieces: int, *, only_last: bool) -> None:
    """Check that slots, chunks and pieces are in range, and that no piece is listed twice.

    only_last: whether a piece may only be the last part of its row. Errors: `link_states`.
    """
    initial_slots, part_indptr, parts = rows.initial_slots, rows.part_indptr, rows.parts
    check_indptr("part_indptr", part_indptr, len(parts))
    if (place := _first_outside(initial_slots + 1, num_states + 1)) is not None:
        raise ValueError(f"initial_slots: expected -1 to {num_states - 1}, got {initial_slots[place]} at {place}")
    begin, end = part_indptr[0], part_indptr[-1]
    used = parts[begin:end]
    if (place := _first_outside(used + num_pieces, num_chunks + num_pieces)) is not None:
        raise ValueError(f"parts: expected {-num_pieces} to {num_chunks - 1}, got {used[place]} at {begin + place}")
    pieces = used[used < 0]
    if len(pieces.unique()) < len(pieces):
        raise ValueError("parts: expected each piece once, got one twice")
    places = (used < 0).nonzero()[:, 0] + begin
    if only_last and (inside := places[~torch.isin(places, part_indptr[1:] - 1)]).numel():
        raise ValueError(
            f"parts: without effects of pieces, expected these at the ends of rows only, got one at {inside[0]}"
        )


def _first_outside(values: torch.Tensor, size: int) -> int | None:
    """The place of the first value that is not in [0, size), or None."""
    if not len(values):
        return None
    low, high = values.aminmax()
    if low >= 0 and high < size:
        return None
    return int(((values < 0) | (values >= size)).nonzero()[0])

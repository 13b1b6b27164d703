"""Preconditions that implementations on GPUs rely on but do not check, since they would have to wait for the device.
The PyTorch implementation checks them, so every test on a CPU does."""

import bisect
import zlib

import torch


def check_segments(
    kv_indptr: torch.Tensor,
    most: int,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    *,
    padded: bool = False,
) -> None:
    """Check that rows lie within what lists KV tokens, `most` of them, and that the segments of each are in order.

    padded: whether segments may end beyond their rows, as in those that pad a decode batch.
    Other arguments and errors: `link_decode`.
    """
    _check_indptr("kv_indptr", kv_indptr, most)
    width = segment_ends.shape[1]
    _refuse((num_segments < 0) | (num_segments > width), f"num_segments: expected 0 to {width}")
    ends = segment_ends.masked_fill(~_used(num_segments, segment_ends), 0)
    steps = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    _refuse(_used(num_segments, steps) & (steps < 0), "segment_ends: expected to ascend from 0")
    if not padded:
        _refuse(ends > kv_indptr.diff()[:, None], "segment_ends: expected at most the row's length")


def check_reads(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_segments: torch.Tensor,
    segment_offsets: torch.Tensor,
    num_slots: int,
    num_rotations: int,
) -> None:
    """Check that slots lie within the cache, and offsets within the table of angles. For rows that have passed
    `check_segments`; arguments and errors as there."""
    indptr = kv_indptr.tolist()
    slots = kv_indices[indptr[0] : indptr[-1]]
    if (place := _first_outside(slots, num_slots)) is not None:
        row = bisect.bisect_right(indptr, indptr[0] + place) - 1
        raise ValueError(f"kv_indices: expected slots from 0 to {num_slots - 1}, got {slots[place]} in row {row}")
    outside = (segment_offsets < 0) | (segment_offsets >= num_rotations)
    _refuse(
        _used(num_segments, segment_offsets) & outside, f"segment_offsets: expected rows from 0 to {num_rotations - 1}"
    )


def check_queries(qo_indptr: torch.Tensor, nnz_qo: int, max_extend_len: int) -> None:
    """Check that rows of queries lie within `q`, and that none has more than `max_extend_len` queries. Arguments and
    errors: `link_extend`."""
    _check_indptr("qo_indptr", qo_indptr, nnz_qo)
    longest = max(qo_indptr.diff().tolist(), default=0)
    if longest > max_extend_len:
        raise ValueError(f"max_extend_len: expected the longest qo_len, {longest}, or more, got {max_extend_len}")


def check_positions(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_positions: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
) -> None:
    """Check that positions ascend strictly within each segment, the cached text and the new text of each row. For rows
    that have passed `check_segments`; arguments and errors: `link_extend`."""
    begins = kv_indptr[:-1, None]
    ends = (begins + segment_ends)[_used(num_segments, segment_ends)]
    starts = torch.cat([kv_indptr, kv_indptr[1:] - qo_indptr.diff(), ends])
    descents = (kv_positions[: kv_indptr[-1]].diff() <= 0).nonzero()[:, 0] + 1
    wrong = descents[~torch.isin(descents, starts)]
    if len(wrong):
        raise ValueError(f"kv_positions: expected to ascend in each part of a row, got a lower one at {wrong[0]}")


def check_shared_segments(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_ids: torch.Tensor,
) -> None:
    """Check that segments of one id list the same slots. Arguments and errors: `plan_decode`."""
    known: dict[int, list[int]] = {}
    indptr, ends, ids = kv_indptr.tolist(), segment_ends.tolist(), segment_ids.tolist()
    for b, count in enumerate(num_segments.tolist()):
        for start, end, name in zip([0, *ends[b]], ends[b][:count], ids[b], strict=False):
            if name < 0 or end >= indptr[b + 1] - indptr[b]:  # shared with nobody
                continue
            slots = kv_indices[indptr[b] + start : indptr[b] + end].tolist()
            if known.setdefault(name, slots) != slots:
                raise ValueError(f"segment_ids: expected the same slots in all segments of id {name}, got others")


def fingerprint(
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    segment_offsets: torch.Tensor,
    num_heads_and_dim: tuple[int, int, int],
) -> int:
    """32 bits that tell one planned batch from another; arguments as for `plan_decode`."""
    used = _used(num_segments, segment_ends)
    parts = (kv_indptr, kv_indices[: kv_indptr[-1]], num_segments, segment_ends[used], segment_offsets[used])
    values = torch.cat([part.int() for part in parts]).cpu()
    return zlib.crc32(values.numpy(), zlib.crc32(repr(num_heads_and_dim).encode()))


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


def check_parts(
    initial_slots: torch.Tensor,
    part_indptr: torch.Tensor,
    parts: torch.Tensor,
    num_states: int,
    num_chunks: int,
    num_pieces: int,
    only_last: bool,
) -> None:
    """Check that slots, chunks and pieces are in range, and that no piece is listed twice.

    only_last: whether a piece may only be the last part of its row. Arguments and errors: `link_states`.
    """
    _check_indptr("part_indptr", part_indptr, len(parts))
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
            f"parts: without piece_states, expected pieces at the ends of rows only, got one at {inside[0]}"
        )


def _check_indptr(name: str, indptr: torch.Tensor, most: int) -> None:
    values = indptr.tolist()
    if values != sorted(values) or values[0] < 0 or values[-1] > most:
        raise ValueError(f"{name}: expected to ascend from 0 to at most {most}, got {values}")


def _used(num_segments: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
    """Which elements of a segment table count: bool, in its shape."""
    return torch.arange(segments.shape[1], device=segments.device) < num_segments[:, None]


def _first_outside(values: torch.Tensor, size: int) -> int | None:
    """The place of the first value that is not in [0, size), or None."""
    if not len(values):
        return None
    low, high = values.aminmax()
    if low >= 0 and high < size:
        return None
    return int(((values < 0) | (values >= size)).nonzero()[0])


def _refuse(wrong: torch.Tensor, expectation: str) -> None:
    """Raise ValueError naming the first invalid row of a batch, if any."""
    if wrong.any():
        raise ValueError(f"{expectation}, got others in row {int(wrong.nonzero()[0, 0])}")

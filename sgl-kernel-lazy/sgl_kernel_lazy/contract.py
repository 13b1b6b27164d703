"""What implementations on GPUs rely on but do not check, since they would have to wait for the device. The PyTorch
implementation does, and with it whatever is tested on a CPU."""

import torch


def check_extend_rows(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_positions: torch.Tensor,
    num_segments: torch.Tensor,
    segment_ends: torch.Tensor,
    max_extend_len: int,
) -> None:
    """Check that positions ascend strictly within each segment, the cached text and the new text of each row, and that
    no row has more than `max_extend_len` queries. Arguments and errors: `link_extend`."""
    new, indptr = qo_indptr.diff().tolist(), kv_indptr.tolist()
    if max(new, default=0) > max_extend_len:
        raise ValueError(f"max_extend_len: expected the longest qo_len, {max(new)}, or more, got {max_extend_len}")
    starts = {*indptr, *(end - count for end, count in zip(indptr[1:], new, strict=True))}
    for begin, count, ends in zip(indptr, num_segments.tolist(), segment_ends.tolist(), strict=False):
        starts.update(begin + end for end in ends[:count])
    descents = kv_positions[: indptr[-1]].diff() <= 0
    if wrong := set((descents.nonzero()[:, 0] + 1).tolist()) - starts:
        raise ValueError(f"kv_positions: expected to ascend in each part of a row, got a lower one at {min(wrong)}")


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

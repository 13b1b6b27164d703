"""Into how many splits the keys of a prefill are cut: the cheapest by a model of the time."""

from typing import NamedTuple


class SplitTimes(NamedTuple):
    """Measured times of a kernel, in microseconds.

    merge_rate: bytes of partial results that are written and merged in one microsecond.
    """

    tile: float
    item: float
    merge: float
    merge_rate: float


def best_num_splits(
    times: SplitTimes, *, num_items: int, num_tiles: int, num_results: int, head_dim: int, num_sms: int, max_splits: int
) -> int:
    """The number of splits with the shortest modelled time.

    num_items: work items without splits, each over num_tiles tiles of keys; an SM runs one at a time.
    num_results: (token, query head) rows of the result, fp32 where they are partial.
    """

    def time(num_splits: int) -> float:
        waves = -(-num_items * num_splits // num_sms)
        merge = times.merge + num_splits * num_results * head_dim * 8 / times.merge_rate if num_splits > 1 else 0.0
        return waves * (-(-num_tiles // num_splits) * times.tile + times.item) + merge

    return min(range(1, min(num_tiles, max_splits) + 1), key=time)

"""The free slots of host memory. What is given out together lies together where possible: runs are copied fastest."""

import numpy as np
import torch


def runs(*slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the runs of these lists begin, and their lengths: parts in which each list counts up by one.

    slots: [n] int64 each, of one length.
    """
    breaks = np.zeros(max(0, len(slots[0]) - 1), dtype=bool)
    for each in slots:
        breaks |= np.diff(each) != 1
    starts = np.concatenate([np.zeros(min(1, len(slots[0])), np.int64), np.flatnonzero(breaks) + 1])
    return starts, np.diff(starts, append=len(slots[0]))


class HostSlots:
    """Slots 0 .. size-1, given out and taken back in lists: int64 on the CPU.

    num_free: how many are free.
    """

    def __init__(self, size: int):
        self.size = size
        self.clear()

    def clear(self) -> None:
        """Take back all slots."""
        self.num_free = self.size
        # Of the free extents, which do not touch, in order.
        self._starts, self._ends = np.zeros(1, np.int64), np.full(1, self.size, np.int64)

    def alloc(self, count: int) -> torch.Tensor | None:
        """`count` slots: from the smallest extent that has them all, else from the largest ones. None if fewer are
        free."""
        if count > self.num_free:
            return None
        if not count:
            return torch.empty(0, dtype=torch.int64)
        lengths = self._ends - self._starts
        fitting = np.flatnonzero(lengths >= count)
        if len(fitting):
            chosen, taken = fitting[[lengths[fitting].argmin()]], np.array([count])
        else:
            largest = np.argsort(-lengths, kind="stable")
            total = np.cumsum(lengths[largest])
            chosen = largest[: np.searchsorted(total, count) + 1]
            taken = lengths[chosen]
            taken[-1] -= total[len(chosen) - 1] - count
        slots = np.concatenate(
            [np.arange(start, start + n) for start, n in zip(self._starts[chosen], taken, strict=True)]
        )
        self._starts[chosen] += taken
        left = self._starts < self._ends
        self._starts, self._ends = self._starts[left], self._ends[left]
        self.num_free -= count
        return torch.from_numpy(slots)

    def free(self, slots: torch.Tensor) -> None:
        """Take back slots, in any order. Raises ValueError, and changes nothing, if one is free already."""
        ordered = np.sort(slots.numpy())
        places, lengths = runs(ordered)
        begins = ordered[places]
        at = np.searchsorted(self._starts, begins)
        starts, ends = np.insert(self._starts, at, begins), np.insert(self._ends, at, begins + lengths)
        if (starts[1:] < ends[:-1]).any() or len(ends) and (starts[0] < 0 or ends[-1] > self.size):
            raise ValueError("slots: expected slots that are in use")
        apart = starts[1:] > ends[:-1]
        one = np.ones(min(1, len(starts)), dtype=bool)
        self._starts, self._ends = starts[np.concatenate([one, apart])], ends[np.concatenate([apart, one])]
        self.num_free += len(ordered)

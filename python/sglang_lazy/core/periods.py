"""Sums over the periods of the last hour."""

from collections.abc import Iterable, Sequence

SECONDS, PERIODS = 20, 180
"""The length of a period, and the number of periods kept: an hour."""


class Sums:
    """Sums of numbers over each period in which there were any."""

    def __init__(self) -> None:
        self._periods: dict[int, list[int]] = {}

    def add(self, numbers: Sequence[int], now: float) -> None:
        """Add each of these numbers, always as many.  now: seconds since the epoch."""
        sums = self._periods.setdefault(int(now // SECONDS), [0] * len(numbers))
        sums[:] = map(sum, zip(sums, numbers, strict=True))
        if len(self._periods) > PERIODS:
            del self._periods[min(self._periods)]

    def rows(self, now: float) -> list[list[int]]:
        """For each period of the last hour, in order: its beginning, seconds since the epoch, and the sums."""
        return [[i * SECONDS, *self._periods[i]] for i in sorted(self._periods) if i > now // SECONDS - PERIODS]


def merged(several: Iterable[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The rows of several `Sums` added up."""
    periods: dict[int, list[int]] = {}
    for began, *numbers in (row for rows in several for row in rows):
        periods[began] = [*map(sum, zip(periods.get(began, [0] * len(numbers)), numbers, strict=True))]
    return [[began, *periods[began]] for began in sorted(periods)]

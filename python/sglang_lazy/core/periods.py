"""Sums over the periods of the last hour."""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

SECONDS, PERIODS = 20, 180
"""The length of a period, and the number of periods kept: an hour."""
MAX_TENANTS = 200
"""How many tenants' sums are kept, those that were added to last: at most 5 MB."""
_EVERYBODY = object()


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


class SumsByTenant:
    """The `Sums` of each tenant, and of all together: a tenant's own tell it nothing of what others do."""

    def __init__(self) -> None:
        self._sums: OrderedDict[Hashable, Sums] = OrderedDict()

    def add(self, tenant: Hashable, numbers: Sequence[int], now: float) -> None:
        """As `Sums.add`."""
        for whose in (tenant, _EVERYBODY):
            self._sums.setdefault(whose, Sums()).add(numbers, now)
            self._sums.move_to_end(whose)
        if len(self._sums) > MAX_TENANTS + 1:  # everybody's
            self._sums.popitem(last=False)

    def rows(self, tenant: Hashable, everybody: bool, now: float) -> list[list[int]]:
        """As `Sums.rows`, of one tenant or of everybody."""
        return self._sums.get(_EVERYBODY if everybody else tenant, Sums()).rows(now)


def merged(several: Iterable[Sequence[Sequence[int]]]) -> list[list[int]]:
    """The rows of several `Sums` added up."""
    periods: dict[int, list[int]] = {}
    for began, *numbers in (row for rows in several for row in rows):
        periods[began] = [*map(sum, zip(periods.get(began, [0] * len(numbers)), numbers, strict=True))]
    return [[began, *periods[began]] for began in sorted(periods)]

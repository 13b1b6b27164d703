"""Which slots of the device nodes have, known on the CPU without waiting for the device."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_lazy.cache.node import Node


class Numbers:
    """Slots of the device that are being read to the CPU: to wait for them would be to wait for passes."""

    def __init__(self, values: torch.Tensor, event: Any):
        self._values, self._event = values, event

    @property
    def known(self) -> torch.Tensor | None:
        """[n] int64 on the CPU, None until they have come."""
        return self._values if self._event.query() else None

    def part(self, start: int, end: int) -> "Numbers":
        """Those from `start` to `end`."""
        return Numbers(self._values[start:end], self._event)


class KnownSlots:
    """The slots of a tree's nodes.

    read: begins to read slots, see `Transfers.numbers`.
    """

    def __init__(self, read: Callable[[torch.Tensor], Numbers]):
        self._read = read
        self._of_nodes: dict[int, Numbers] = {}  # by node id
        self._leaving: list[Numbers | None] | None = None  # of nodes that leave within `leaving`

    def came(self, nodes: Iterable[Node], slots: torch.Tensor) -> None:
        """Nodes have got these slots, one after the other."""
        numbers, start = self._read(slots), 0
        for node in nodes:
            self._of_nodes[node.id] = numbers.part(start, start := start + len(node))

    def split(self, above: Node, node: Node) -> None:
        """`above` has taken the beginning of `node`."""
        if (numbers := self._of_nodes.get(node.id)) is not None:
            self._of_nodes[above.id] = numbers.part(0, len(above))
            self._of_nodes[node.id] = numbers.part(len(above), len(above) + len(node))

    def left(self, node: Node) -> None:
        """`node` has lost its slots, or loses them next."""
        numbers = self._of_nodes.pop(node.id, None)
        if self._leaving is not None:
            self._leaving.append(numbers)

    def of(self, node: Node) -> torch.Tensor | None:
        """[number of tokens] int64 on the CPU; None if they are not known."""
        numbers = self._of_nodes.get(node.id)
        return None if numbers is None else numbers.known

    @contextmanager
    def leaving(self) -> Iterator[list[Numbers | None]]:
        """A context whose value lists the slots of nodes that leave in it."""
        leaving: list[Numbers | None] = []
        self._leaving = leaving
        try:
            yield leaving
        finally:
            self._leaving = None


def joined(parts: Iterable[Numbers | None]) -> torch.Tensor | None:
    """Slots one after the other, int64 on the CPU; None if some are not known."""
    known = []
    for numbers in parts:
        if numbers is None or (slots := numbers.known) is None:
            return None
        known.append(slots)
    return torch.cat(known) if known else None

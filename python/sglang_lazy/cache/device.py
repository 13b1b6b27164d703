"""The device's pool of KV slots, as those see it who take slots and give them back."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class WindowMemory(NamedTuple):
    """The pool of window KV, in tokens.

    size: capacity.  free: free or evictable.  window: how many tokens before its own a query sees.
    """

    size: int
    free: int
    window: int

    def of_row(self, span_lens: Sequence[int], num_own: int) -> int:
        """The most window KV of a row's own tokens at a time: the tree keeps that of the end of each text span, even
        when the answer, which is part of the last one, has left it behind.

        span_lens: of the prompt's text spans.  num_own: the row's tokens of text and answer.
        """
        *earlier, _ = span_lens
        last = min(num_own - sum(earlier), 2 * self.window + 1)
        return sum(min(length, self.window) for length in earlier) + last


class Device(Protocol):
    """A pool of slots, which several trees may share."""

    device: torch.device

    @property
    def size(self) -> int:
        """Capacity, in slots."""

    def available_size(self) -> int:
        """The number of free slots."""

    def evictable_size(self) -> int:
        """The number of slots that eviction can free."""

    @property
    def windows(self) -> WindowMemory | None:
        """The pool of window KV; None if all layers share one pool."""

    def alloc(self, count: int) -> torch.Tensor | None:
        """Slots, int64, of those that are free. None if these are fewer."""

    def allocate(self, count: int) -> torch.Tensor:
        """The same, evicting as needed. Raises RuntimeError if memory runs out."""

    def take(self, num_tokens: int) -> torch.Tensor:
        """Evict so many slots, or all that can be. Returns those of the tree with the host tier, as `RadixTree.take`
        does; others are freed."""

    def free(self, slots: torch.Tensor) -> None:
        """Take back slots, and the window KV in them."""

    def clear(self) -> None:
        """Take back all slots."""

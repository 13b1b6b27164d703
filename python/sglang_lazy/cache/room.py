"""Room in a pool: who gives slots back, so that others get them.

A pool may be our tree's alone (`OneTree`), or one that it shares with another cache (`Room`).
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from sglang_lazy.cache.device import WindowMemory
from sglang_lazy.cache.mirror import AgedTree, Mirror, evict_older
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.cache.windows import Windows


class Amounts(NamedTuple):
    """What an eviction is to give, or has given: tokens, tokens of window KV, and states."""

    tokens: int = 0
    windows: int = 0
    states: int = 0

    def plus(self, more: "Amounts") -> "Amounts":
        return Amounts(*map(sum, zip(self, more, strict=True)))


Giving = Callable[[Amounts], Amounts]
"""A way of the other cache to evict: as much as is wanted, or all that it has; returns what it gave."""


class OtherCache(Protocol):
    """A cache that shares a pool with our tree."""

    def evictable(self) -> int:
        """How many tokens it can give."""

    def evictable_windows(self) -> int:
        """How many tokens of window KV."""

    def num_left(self) -> int:
        """How many tokens it has, locked ones as well."""

    def make_room(self, wanted: Amounts) -> Amounts:
        """Its way to evict for allocations."""

    def count(self, num_tokens: int, begun: float) -> None:
        """Our tree has given so many tokens in an eviction that began at this time of `perf_counter`."""


class Copying(Protocol):
    """Copies between the device and tiers below, which lock what they read or write."""

    @property
    def is_copying(self) -> bool: ...

    def finish(self) -> None: ...


class Trees(Protocol):
    """What gives the slots of a pool back: `Room`, or `OneTree`."""

    def evictable_size(self) -> int: ...

    def take(self, num_tokens: int) -> torch.Tensor: ...

    def make_room(self, num_tokens: int) -> None: ...

    def window_memory(self) -> WindowMemory | None: ...


class Pool:
    """A `Device` over an allocator of slots, which `trees` give back."""

    def __init__(self, allocator: Any, trees: Trees):
        self._allocator, self._trees, self.device = allocator, trees, torch.device(allocator.device)
        self.free, self.alloc, self.available_size = allocator.free, allocator.alloc, allocator.available_size
        self.take, self.evictable_size = trees.take, trees.evictable_size

    @property
    def size(self) -> int:
        return self._allocator.size

    def clear(self) -> None:
        self._allocator.clear()

    @property
    def windows(self) -> WindowMemory | None:
        return self._trees.window_memory()

    def allocate(self, count: int) -> torch.Tensor:
        self._trees.make_room(count)
        slots = self._allocator.alloc(count)
        if slots is None:
            raise RuntimeError(f"out of KV memory: {count} tokens wanted, {self.available_size()} free")
        return slots


class OneTree:
    """The tree of a pool that no other cache shares.  copying: of its nodes; None without."""

    def __init__(self, tree: RadixTree):
        self._tree, self.take = tree, tree.take
        self.copying: Copying | None = None

    def evictable_size(self) -> int:
        return self._tree.num_evictable

    def make_room(self, num_tokens: int) -> None:
        slots = self._tree.allocator
        self._tree.evict(num_tokens - slots.available_size())
        if slots.available_size() < num_tokens and self.copying is not None:
            self.copying.finish()  # copies under way lock what they read or write
            self._tree.evict(num_tokens - slots.available_size())

    def window_memory(self) -> WindowMemory | None:
        return None


class Room:
    """Evicts from two caches as if they were one.

    other: the other cache.  tree: ours.  windows: the part of `tree` for window KV; None if all layers share a pool.
    mirror: of `other`, whose nodes tell no ages.  copying: of nodes of `tree`; None without.
    """

    def __init__(self, other: OtherCache, tree: RadixTree, windows: Windows | None):
        self.mirror = Mirror()
        self.copying: Copying | None = None
        self._other, self._tree, self._windows = other, tree, windows

    def evict(self, wanted: Amounts, giving: Giving) -> Amounts:
        """Evict what is wanted, or all that can be.  giving: how the other cache evicts."""
        begun, windows = time.perf_counter(), self._windows
        windows_before = 0 if windows is None else windows.pool.available_size()
        own, given = self._evict_tokens(wanted.tokens, self._tree, giving)
        if windows is not None:
            given = given.plus(self._evict_windows(windows, windows_before + wanted.windows, giving))
            given = given._replace(windows=windows.pool.available_size() - windows_before)
        elif wanted.windows:
            given = given.plus(self._give(Amounts(windows=wanted.windows), giving))
        if wanted.states:
            given = given.plus(self._give(Amounts(states=wanted.states), giving))
        self._other.count(own, begun)
        return given._replace(tokens=given.tokens + own)

    def evictable_size(self) -> int:
        """The tokens that can be evicted."""
        return self._other.evictable() + self._tree.num_evictable

    def make_room(self, num_tokens: int) -> None:
        """Evict until so many slots are free, with window KV, or nothing more can be evicted."""
        lacking = max(0, num_tokens - self._tree.allocator.available_size())
        windows = 0 if self._windows is None else max(0, num_tokens - self._windows.pool.available_size())
        if lacking or windows:
            self.evict(Amounts(lacking, windows), self._other.make_room)

    def take(self, num_tokens: int) -> torch.Tensor:
        """Evict so many tokens; returns the slots of our tree among them, those of the other cache are free."""
        taker = _Taker(self._tree)
        self._evict_tokens(num_tokens, taker, self._other.make_room)
        return torch.cat(taker.slots)

    def window_memory(self) -> WindowMemory | None:
        """The pool of window KV; None if all layers share a pool."""
        return None if self._windows is None else self._windows.memory(self._other.evictable_windows())

    def _evict_tokens(self, num_tokens: int, tree: AgedTree, giving: Giving) -> tuple[int, Amounts]:
        """Evict from both; returns how many tokens `tree`, ours or a view of it, gave, and what the other did. If that
        falls short, waits for copies under way."""
        own, given = 0, Amounts()

        def give(count: int) -> int:
            nonlocal given
            gave = self._give(Amounts(tokens=count), giving)
            given = given.plus(gave)
            return gave.tokens

        while (missing := num_tokens - own - given.tokens) > 0:
            own += evict_older(missing, tree, self.mirror, give)
            if own + given.tokens >= num_tokens or self.copying is None or not self.copying.is_copying:
                break
            self.copying.finish()
        return own, given

    def _evict_windows(self, windows: Windows, aim: int, giving: Giving) -> Amounts:
        """Evict window KV until `aim` tokens of it are free; returns what the other cache gave. Its ages are known in
        our tree only, so the tree with more of it to give is asked first."""

        def missing() -> int:
            return max(0, aim - windows.pool.available_size())

        given = Amounts()
        if windows.num_evictable >= self._other.evictable_windows():
            windows.evict(min(missing(), windows.num_evictable))
        if missing():
            given = self._give(Amounts(windows=missing()), giving)
        windows.evict(missing())  # in the end, waiting requests lose their locks
        return given

    def _give(self, wanted: Amounts, giving: Giving) -> Amounts:
        """Have the other cache evict; returns what it gave."""
        given = giving(wanted)
        self.mirror.gave(given.tokens, self._other.num_left())
        return given


class _Taker:
    """Our tree for `evict_older`, as `take` evicts from it.  slots: those evicted, int64."""

    def __init__(self, tree: RadixTree):
        self._tree, self.oldest = tree, tree.oldest
        self.slots = [tree.take(0)]

    @property
    def num_evictable(self) -> int:
        return self._tree.num_evictable

    def evict(self, num_tokens: int) -> int:
        self.slots.append(self._tree.take(num_tokens))
        return len(self.slots[-1])

"""Room in the pool that SGLang's own cache and our tree share: what each of them evicts."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult

from sglang_lazy.cache.device import WindowMemory
from sglang_lazy.cache.mirror import AgedTree, Mirror, evict_older
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.cache.windows import Windows

PlainGives = Callable[..., EvictResult]
"""A method of SGLang's cache that evicts."""


class Copying(Protocol):
    """Copies between the device and tiers below, which lock what they read or write."""

    @property
    def is_copying(self) -> bool: ...

    def finish(self) -> None: ...


class Room:
    """Evicts from both trees as if they were one.

    plain: SGLang's cache.  tree: ours.  windows: the part of `tree` for window KV; None if all layers share a pool.
    mirror: of `plain`, whose nodes tell no ages.  copying: of nodes of `tree`; None without.
    plain_gives: the method of `plain` that makes room for allocations.
    """

    def __init__(self, plain: Any, tree: RadixTree, windows: Windows | None):
        self.mirror = Mirror()
        self.copying: Copying | None = None
        self._plain, self._tree, self._windows = plain, tree, windows
        self.plain_gives: PlainGives = plain.evict_for_alloc

    def evict(self, wanted: EvictParams, plain_gives: PlainGives) -> EvictResult:
        """Evict what `wanted` names, or all that can be."""
        begun, given, windows = time.perf_counter(), EvictResult(), self._windows
        windows_before = 0 if windows is None else windows.pool.available_size()
        own = self._evict_tokens(wanted.num_tokens, self._tree, given, plain_gives)
        if windows is not None:
            self._evict_windows(windows, windows_before + wanted.swa_num_tokens, given, plain_gives)
            given.swa_num_tokens_evicted = windows.pool.available_size() - windows_before
        elif wanted.swa_num_tokens:
            self._give(EvictParams(swa_num_tokens=wanted.swa_num_tokens), given, plain_gives)
        if wanted.mamba_num:
            self._give(EvictParams(mamba_num=wanted.mamba_num), given, plain_gives)
        self._plain.update_eviction_metrics(own, begun)
        given.num_tokens_evicted += own
        return given

    def evictable_size(self) -> int:
        """The tokens that can be evicted."""
        return self._plain.full_evictable_size() + self._tree.num_evictable

    def make_room(self, num_tokens: int) -> None:
        """Evict until so many slots are free, with window KV, or nothing more can be evicted."""
        lacking = max(0, num_tokens - self._tree.allocator.available_size())
        windows = 0 if self._windows is None else max(0, num_tokens - self._windows.pool.available_size())
        if lacking or windows:
            self.evict(EvictParams(num_tokens=lacking, swa_num_tokens=windows), self.plain_gives)

    def take(self, num_tokens: int) -> torch.Tensor:
        """Evict so many tokens; returns the slots of our tree among them, those of SGLang's cache are free."""
        taker = _Taker(self._tree)
        self._evict_tokens(num_tokens, taker, EvictResult(), self.plain_gives)
        return torch.cat(taker.slots)

    def window_memory(self) -> WindowMemory | None:
        """The pool of window KV; None if all layers share a pool."""
        return None if self._windows is None else self._windows.memory(self._plain.swa_evictable_size())

    def _evict_tokens(self, num_tokens: int, tree: AgedTree, given: EvictResult, plain_gives: PlainGives) -> int:
        """Evict from both; returns how many tokens `tree`, ours or a view of it, gave. If that falls short, waits for
        copies under way."""
        own = 0

        def give(count: int) -> int:
            return self._give(EvictParams(num_tokens=count), given, plain_gives)

        while (missing := num_tokens - own - given.num_tokens_evicted) > 0:
            own += evict_older(missing, tree, self.mirror, give)
            if own + given.num_tokens_evicted >= num_tokens or self.copying is None or not self.copying.is_copying:
                break
            self.copying.finish()
        return own

    def _evict_windows(self, windows: Windows, aim: int, given: EvictResult, plain_gives: PlainGives) -> None:
        """Evict window KV until `aim` tokens of it are free. Its ages are known in our tree only, so the tree with more
        of it to give is asked first."""

        def missing() -> int:
            return max(0, aim - windows.pool.available_size())

        if windows.num_evictable >= self._plain.swa_evictable_size():
            windows.evict(min(missing(), windows.num_evictable))
        if missing():
            self._give(EvictParams(swa_num_tokens=missing()), given, plain_gives)
        windows.evict(missing())  # in the end, waiting requests lose their locks

    def _give(self, wanted: EvictParams, given: EvictResult, plain_gives: PlainGives) -> int:
        """Have SGLang's cache evict; adds to `given`, and returns how many tokens it did."""
        result = plain_gives(wanted)
        for field in dataclasses.fields(EvictResult):
            setattr(given, field.name, getattr(given, field.name) + getattr(result, field.name))
        num_left = self._plain.full_evictable_size() + self._plain.full_protected_size()
        self.mirror.gave(result.num_tokens_evicted, num_left)
        return result.num_tokens_evicted


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

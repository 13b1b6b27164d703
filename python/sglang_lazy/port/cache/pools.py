"""SGLang's pools of the device, as our trees and rows see them."""

from typing import Any, Protocol

import torch

from sglang_lazy.cache.device import WindowMemory
from sglang_lazy.cache.tree import RadixTree
from sglang_lazy.port.cache.room import Copying


class Trees(Protocol):
    """What gives the slots of a pool back: `Room`, or `OneTree`."""

    def evictable_size(self) -> int: ...

    def take(self, num_tokens: int) -> torch.Tensor: ...

    def make_room(self, num_tokens: int) -> None: ...

    def window_memory(self) -> WindowMemory | None: ...


class Pool:
    """A `Device` over SGLang's allocator, or `HybridSlots` over it, whose slots `trees` give back."""

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
    """The tree of a pool that no cache of SGLang's shares.  copying: of its nodes; None without."""

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


class HybridSlots:
    """The slots of SGLang's hybrid allocator, where those that have lost their window KV are freed like others."""

    def __init__(self, allocator: Any):
        self._allocator, self.device = allocator, torch.device(allocator.device)
        self.alloc, self.available_size = allocator.alloc, allocator.full_available_size

    @property
    def size(self) -> int:
        return self._allocator.size_full

    def free(self, slots: torch.Tensor) -> None:
        has_window = self._allocator.full_to_swa_index_mapping[slots] > 0
        self._allocator.free(slots[has_window])
        self._allocator.free_full(slots[~has_window])


class WindowSlots:
    """A `WindowPool` over SGLang's hybrid allocator.  window: how many tokens before its own a query sees."""

    def __init__(self, allocator: Any, window: int):
        self._allocator, self.window = allocator, window
        self.available_size, self.free = allocator.swa_available_size, allocator.free_swa

    @property
    def size(self) -> int:
        return self._allocator.size_swa

    def share(self, slots: torch.Tensor, lenders: torch.Tensor) -> None:
        window_slots = self._allocator.full_to_swa_index_mapping
        window_slots[slots] = window_slots[lenders]

    def take_back(self, lenders: torch.Tensor) -> None:
        self._allocator.clear_full_to_swa_mapping(lenders)

"""SGLang's allocators of KV slots, recording what was computed into each slot."""

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

NOT_COMPUTED = "not computed"


class Slots(TokenToKVPoolAllocator):
    """SGLang's allocator, recording what was computed into each slot since its allocation."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.contents: dict[int, Any] = {}
        super().__init__(*args, **kwargs)
        self._kvcache.slots = self

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self.contents.update((slot, NOT_COMPUTED) for slot in slots.tolist())
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        for slot in free_index.tolist():
            assert self.contents.pop(slot, None), f"slot {slot} was freed but not in use"
        super().free(free_index)

    def clear(self) -> None:
        super().clear()
        self.contents.clear()

    def compute(self, slot: int, content: Any) -> None:
        assert self.contents[slot] == NOT_COMPUTED
        self.contents[slot] = content


class HybridSlots(SWATokenToKVPoolAllocator):
    """The same for two pools. window_contents: those of the second pool, by its slots."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.contents: dict[int, Any] = {}
        self.window_contents: dict[int, Any] = {}
        super().__init__(*args, **kwargs)

    def window_slots(self, slots: Iterable[int]) -> list[int]:
        """The corresponding slots of the second pool; 0 where there is none."""
        return self.full_to_swa_index_mapping[torch.tensor([*slots], dtype=torch.int64)].tolist()

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self.contents.update((slot, NOT_COMPUTED) for slot in slots.tolist())
            self.window_contents.update((slot, NOT_COMPUTED) for slot in self.window_slots(slots.tolist()))
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        for slot in free_index.tolist():
            assert self.contents.pop(slot, None), f"slot {slot} was freed but not in use"
        super().free(free_index)

    def free_swa(self, free_index: torch.Tensor) -> None:
        for slot in filter(None, self.window_slots(free_index.tolist())):
            assert self.window_contents.pop(slot, None), f"window slot {slot} was freed but not in use"
        super().free_swa(free_index)

    def clear(self) -> None:
        super().clear()
        self.contents.clear()
        self.window_contents.clear()

    def compute(self, slot: int, content: Any) -> None:
        (window_slot,) = self.window_slots([slot])
        assert self.contents[slot] == self.window_contents[window_slot] == NOT_COMPUTED
        self.contents[slot] = self.window_contents[window_slot] = content

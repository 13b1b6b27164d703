"""SGLang's allocators of KV slots, recording what was computed into each slot."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator, swa
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

NOT_COMPUTED = "not computed"


class Slots(TokenToKVPoolAllocator):
    """SGLang's allocator, recording what was computed into each slot since its allocation."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.contents: dict[int, Any] = {}
        super().__init__(*args, **kwargs)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        slots = super().alloc(need_size)
        if slots is not None:
            self.contents.update((slot, NOT_COMPUTED) for slot in slots.tolist())
        return slots

    def free(self, free_index: torch.Tensor) -> None:
        if self.free_group is None:  # else it is called again, with all of the group
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
    """The same for two pools."""

    def __init__(self, *args: Any, **kwargs: Any):
        with mock.patch.object(swa, "TokenToKVPoolAllocator", Slots):
            super().__init__(*args, **kwargs)

    @property
    def contents(self) -> dict[int, Any]:
        return self.full_attn_allocator.contents

    @property
    def window_contents(self) -> dict[int, Any]:
        """Those of the second pool, by its slots."""
        return self.swa_attn_allocator.contents

    def window_slots(self, slots: Iterable[int]) -> list[int]:
        """The corresponding slots of the second pool; 0 where there is none."""
        return self.full_to_swa_index_mapping[torch.tensor([*slots], dtype=torch.int64)].tolist()

    def compute(self, slot: int, content: Any) -> None:
        (window_slot,) = self.window_slots([slot])
        self.full_attn_allocator.compute(slot, content)
        self.swa_attn_allocator.compute(window_slot, content)

"""SGLang's cache, its events and its hybrid allocator, as our tree and what both share know them."""

from array import array
from typing import Any, NamedTuple

import msgspec
import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult
from sglang.srt.mem_cache.utils import get_hash_str

from sglang_lazy.cache import block_events
from sglang_lazy.cache.block_events import Removed, Stored
from sglang_lazy.cache.host_slots import HostSlots
from sglang_lazy.cache.room import Amounts


class PlainCache:
    """The `OtherCache` of SGLang's."""

    def __init__(self, cache: Any):
        self._cache, self._for_alloc = cache, cache.evict_for_alloc
        self.evictable, self.evictable_windows = cache.full_evictable_size, cache.swa_evictable_size
        self.count = cache.update_eviction_metrics

    def num_left(self) -> int:
        return self._cache.full_evictable_size() + self._cache.full_protected_size()

    def evict(self, wanted: Amounts) -> Amounts:
        """What SGLang's scheduler asks for."""
        return _amounts(self._cache.evict(EvictParams(*wanted)))

    def make_room(self, wanted: Amounts) -> Amounts:
        return _amounts(self._for_alloc(EvictParams(*wanted)))

    def make_joint_room(self, wanted: EvictParams, **joint: Any) -> EvictResult:
        """For pools that several kinds of state share, unlike ours."""
        return self._for_alloc(wanted, **joint)


def amounts_wanted(params: EvictParams) -> Amounts:
    return Amounts(params.num_tokens, params.swa_num_tokens, params.mamba_num)


def _amounts(given: EvictResult) -> Amounts:
    return Amounts(given.num_tokens_evicted, given.swa_num_tokens_evicted, given.mamba_num_evicted)


class BlockEvents(block_events.BlockEvents):
    """KV events of both trees, as SGLang publishes them for prefixes (`--kv-events-config`), by its hashes."""

    def __init__(self) -> None:
        super().__init__(_hashes, StorageMedium.GPU, StorageMedium.CPU)

    def merge(self, plain: list[Any]) -> list[Any]:
        """The events that followers need, given those of SGLang's cache since the last call; takes our tree's."""
        events: list[Any] = []
        for event in plain:
            if isinstance(event, AllBlocksCleared):  # what was before does not matter
                self.plain_cleared()
                events = [event]
            else:
                events += map(_published, self.of_plain(_told(event)))
        return [*events, *map(_published, self.of_own())]


def _hashes(tokens: array, before: bytes) -> bytes:
    return bytes.fromhex("".join(get_hash_str(tokens, before.hex() or None, page_size=1)))


def _told(event: Any) -> Stored | Removed:
    """An event of SGLang's as one of ours."""
    if isinstance(event, BlockRemoved):
        return Removed(event.medium, event.block_hashes, event)
    return Stored(event.medium, event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, event)


def _published(event: Stored | Removed) -> Any:
    """An event of ours as one of SGLang's."""
    if isinstance(event, Removed):
        if event.origin is None:
            return BlockRemoved(event.blocks, event.place)
        return msgspec.structs.replace(event.origin, block_hashes=event.blocks)
    if event.origin is None:
        return BlockStored(event.blocks, event.parent, event.tokens, event.size, None, event.place)
    return msgspec.structs.replace(
        event.origin, block_hashes=event.blocks, token_ids=event.tokens, parent_block_hash=event.parent
    )


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


class HostMemories(NamedTuple):
    """Host memory as SGLang's metrics count it, in tokens: that of SGLang's cache, None without, and ours."""

    plain: Any
    own: HostSlots

    @property
    def logical_size(self) -> int:
        return self.own.size + (0 if self.plain is None else self.plain.logical_size)

    def available_size(self) -> int:
        return self.own.num_free + (0 if self.plain is None else self.plain.available_size())

"""The methods of a tree about window KV and tiers, for a single pool on the device."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_lazy.chunks.tree import WindowMemory
from sglang_lazy.core.prompt import ChunkSlice


class OnePool:
    """Implements the part of `sglang_lazy.chunks.tree.Tree` that concerns other pools and tiers."""

    # Window KV

    @property
    def window_memory(self) -> WindowMemory | None:
        return None

    def unlocked_windows(self, node: TreeNode, spread: int = 0) -> int:
        return 0

    def reads(self, node: TreeNode, spread: int = 0) -> bool:
        return True

    def take_lent(self, slots: torch.Tensor) -> None:
        """Nothing is lent if all layers share one pool."""

    def num_lost(self, req: Any) -> int:
        return 0

    # Tiers

    def load(self, nodes: Sequence[TreeNode]) -> bool:
        raise AssertionError("there is no tier to load from")

    def loading(self, node: TreeNode) -> bool:
        return False

    @property
    def host_memory(self) -> dict[str, int] | None:
        return None

    @property
    def is_copying(self) -> bool:
        """Whether anything is being copied to or from the host."""
        return False

    def fetch(self, chunk: ChunkSlice) -> bool:
        return False

    def back_up(self, nodes: Iterable[TreeNode]) -> None:
        """There is no tier to back up to."""

    @property
    def has_queued_loads(self) -> bool:
        return False

    def started(self, nodes: Iterable[TreeNode]) -> bool:
        """Whether the loads of all these nodes, if any, have been started by a batch that waits for them."""
        return True

    def finish_loads(self) -> None:
        """Start the queued loads, if any, and wait for them."""

"""What components of the tree implement, and what it tells whoever looks on."""

import torch

from sglang_lazy.cache.node import Node


class Part:
    """What nodes hold beside slots on the device; this one holds nothing. The tree calls it, and nobody else."""

    def split(self, above: Node, node: Node) -> None:
        """`above`, new, has taken the beginning of `node`: tokens, slots, locks, and place in the tree."""

    def added(self, end: Node, slots: torch.Tensor, num_present: int, start: int) -> torch.Tensor:
        """Tokens were added up to `end`, as in `RadixTree.add`; returns the slots lent."""
        return slots[:0]

    def used(self, node: Node, spread: int) -> None:
        """Everything up to `node` was used at the time of its `last_use`."""

    def readable(self, node: Node, spread: int | None) -> Node:
        """The last node up to `node` at which a prefix can be read; see `RadixTree.lock` for `spread`, None for all."""
        return node

    def lock(self, node: Node, spread: int) -> None:
        """Keep what reading up to `node` takes."""

    def unlock(self, node: Node, spread: int) -> None:
        """Undo one `lock`."""

    def left_device(self, node: Node) -> bool:
        """`node` loses its slots next. Returns whether it stays in the tree all the same."""
        return False

    def holds(self, node: Node) -> bool:
        """Whether `node` must stay in the tree, locked or not."""
        return False

    def left_tree(self, node: Node) -> None:
        """`node`, which is on no device, leaves the tree."""

    def reset(self) -> None:
        """The tree has forgotten all nodes."""


class Watcher:
    """Is told what leaves; does nothing by itself."""

    def evicted(self, node: Node) -> None:
        """`node` leaves the device next, to make room."""

    def gone(self, node: Node) -> None:
        """`node` has left the tree, or can be read no more."""

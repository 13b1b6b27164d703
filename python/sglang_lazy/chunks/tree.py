"""What the chunk cache needs of a radix tree. The port implements it over SGLang's."""

from array import array
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from sglang_lazy.core.prompt import ChunkSlice

Node = Any
"""A node of the tree, opaque but for `id`, `parent`, `key` (its length counts tokens, `extra_key` is its namespace),
`lock_ref`, `host_ref_counter` (what reads its copy on the host), and where its KV is: `evicted` means that it has no
slots of the device, `backuped` that the host has a copy. With neither it has left the tree.
"""


class Inserted(NamedTuple):
    """num_present: how many of the tokens the tree had already, in slots of its own. node: where the tokens end.
    lent: int64, those of the caller's slots whose window KV the tree has taken for slots of its own; see `Tree.add`.
    """

    num_present: int
    node: Node
    lent: torch.Tensor


class WindowMemory(NamedTuple):
    """How many tokens the pool of window KV can hold, how many of them are free or evictable, and how many before its
    own a query sees."""

    size: int
    free: int
    window: int


class Tree(Protocol):
    """A radix tree over token ids, with namespaces, whose nodes own KV slots, a copy in the host's memory, or both.

    A node stays where it ends when it is split: the new node is its parent. Locking a node locks all nodes above it; a
    node without slots must be loaded before. No node without slots is above one that has some, and none without a copy
    is above one that has one.

    Slots may lose their *window KV*, that of layers with windows, before the rest, where that is in a pool of its own.
    What reads tokens up to a node needs that of the last ones, as many as a window has; where text stands up to
    `spread` tokens before the node, that of as many more. Locking a node keeps it.
    """

    @property
    def evictable_leaves(self) -> Collection[Node]:
        """Leaves that nobody has locked."""

    def evictable_size(self) -> int:
        """How many tokens nobody has locked."""

    def protected_size(self) -> int:
        """How many tokens somebody has locked."""

    @property
    def num_locks(self) -> int:
        """How many locks are held, of all nodes together: each counts where it was taken, and not above."""

    def find(self, tokens: array, namespace: Any, complete: bool = False) -> tuple[torch.Tensor, Node]:
        """The longest beginning on the device that can be read: its slots (int64), and the node where it ends, split
        off if need be.

        complete: wherever text may stand in it, so that it has all of its window KV.
        """

    def holds(self, tokens: array, namespace: Any) -> bool:
        """Whether all tokens are cached, on the device or not. Never splits a node."""

    def end_of(self, tokens: array, namespace: Any) -> Node:
        """The node where tokens that are all cached end, split off if need be."""

    def reads(self, node: Node, spread: int = 0) -> bool:
        """Whether the window KV that is needed of the tokens up to `node` is there."""

    def add(
        self,
        tokens: array,
        namespace: Any,
        slots: torch.Tensor,
        priority: int,
        computed_start: int,
        chunked: bool = False,
    ) -> Inserted:
        """Make tokens resident in `slots` (int64), except for those that the tree has already.

        Where its own slots have lost their window KV, it takes that of `slots`. A pass may yet write to it, so they
        share it until the caller frees them, and calls `take_lent` before.

        computed_start: how many of the first tokens the caller has not computed, or has lost the window KV of.
        chunked: their KV is yet to be computed, at least in part, so it must not be copied.
        """

    def num_lost(self, req: Any) -> int:
        """How many of the first tokens of a request's row, but for those of nodes, have lost their window KV."""

    def take_lent(self, slots: torch.Tensor) -> None:
        """Slots that were `lent` lose their window KV to the tree; no pass that is launched from now on uses them."""

    def slots_to(self, node: Node) -> list[torch.Tensor]:
        """The slots from the beginning of a namespace to the end of `node`, in pieces."""

    def use(self, node: Node, priority: int | None = None, spread: int = 0) -> None:
        """Count a use of everything up to `node` in the eviction order.

        priority: of the request that uses it; None for a mere look-up, which makes KV recent but is no hit.
        """

    def lock(self, node: Node, spread: int = 0) -> int:
        """Lock a node that can be read for one more holder; returns the change in the number of evictable tokens."""

    def unlock(self, node: Node, spread: int = 0) -> int:
        """Give one holder's lock back; returns the same."""

    def remove(self, leaf: Node) -> torch.Tensor:
        """Take an evictable leaf off the device; returns its slots, which are the caller's to free.

        It leaves the tree unless the host has a copy.
        """

    def discardable(self, node: Node) -> bool:
        """Whether nothing depends on `node`: it is a leaf in all tiers, and neither locked nor being copied."""

    def discard(self, node: Node) -> list[torch.Tensor]:
        """Take a discardable node out of the tree and off the host; returns the slots of the device that it had, which
        are the caller's to free."""

    def load(self, node: Node) -> bool:
        """Give `node`, and nodes above it that have none, slots, and have their KV copied from the host before the next
        pass reads it; locked until that is done. False, and nothing changes, where memory does not suffice.
        """

    def loading(self, node: Node) -> bool:
        """Whether its KV is on the way from the host."""

    @property
    def device_memory(self) -> dict[str, int]:
        """How many tokens the device can hold (`size`), and how many more (`free`)."""

    @property
    def window_memory(self) -> "WindowMemory | None":
        """That for window KV; None where all KV is in one pool."""

    def unlocked_windows(self, node: Node, spread: int = 0) -> int:
        """How many tokens of window KV locking `node` would take from what is free or evictable."""

    @property
    def host_memory(self) -> dict[str, int] | None:
        """How many tokens the host can hold (`size`), and how many more (`free`); None if there is no such tier."""

    def fetch(self, chunk: ChunkSlice) -> bool:
        """Ask storage, if there is one, for a chunk that is not cached. Whether it is on its way to the host, where it
        will be cached if it arrives."""

    def back_up(self, nodes: Iterable[Node]) -> None:
        """The KV of all up to these nodes has been computed: copy to the host what the write policy wants there."""

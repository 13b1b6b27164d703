"""The interface of the radix tree under the chunk cache. The port implements it over SGLang's."""

import enum
from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from sglang_lazy.core.prompt import ChunkSlice

Node = Any
"""A node of the tree, opaque except for `id`, `parent`, `key` (its length counts tokens, `extra_key` is its namespace),
`lock_ref`, `host_ref_counter` (readers of its host copy), `evicted` (it has no slots on the device) and `backuped` (the
host has a copy). A node that is evicted and not backed up has left the tree.
"""


class ChunkState(enum.Enum):
    """Where the KV of a chunk is.

    MISSING: nowhere. PENDING: a producer will compute it. FETCHING: being read from storage. HOST: in host memory.
    LOADING: being copied from there to the device. RESIDENT: on the device.

    Any pass launched from now on can attend to a chunk that is LOADING or RESIDENT.
    """

    MISSING = enum.auto()
    PENDING = enum.auto()
    FETCHING = enum.auto()
    HOST = enum.auto()
    LOADING = enum.auto()
    RESIDENT = enum.auto()


class Inserted(NamedTuple):
    """The result of `Tree.add`.

    num_present: how many of the tokens the tree had already, in its own slots.  node: where the tokens end.
    lent: int64, the caller's slots whose window KV the tree has taken for its own slots.
    """

    num_present: int
    node: Node
    lent: torch.Tensor


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


class Tree(Protocol):
    """A radix tree over token ids, with namespaces, whose nodes own KV slots, a copy in host memory, or both.

    When a node is split it keeps its end: the new node is its parent. Locking a node locks its ancestors; a node
    without slots must be loaded first. The ancestors of a node with slots have slots, and those of a node with a host
    copy have copies.

    If window layers have a pool of their own, slots may lose their *window KV* before the rest. To read tokens up to a
    node, the window KV of the last ones is needed, a window's worth plus `spread`: text may stand that many tokens
    before the node's end. Locking a node keeps it.
    """

    @property
    def evictable_leaves(self) -> Collection[Node]:
        """The leaves that are not locked."""

    def evictable_size(self) -> int:
        """The number of tokens in nodes that are not locked."""

    def protected_size(self) -> int:
        """The number of tokens in locked nodes."""

    @property
    def num_locks(self) -> int:
        """The number of locks held; each counts once, at the node where it was taken."""

    def find(self, tokens: array, namespace: Any, complete: bool = False) -> tuple[torch.Tensor, Node]:
        """The longest readable prefix on the device: its slots (int64) and the node where it ends, split if need be.

        complete: whether all of its window KV is needed, not only that of the last tokens.
        """

    def end_of(self, tokens: array, namespace: Any) -> Node | None:
        """The node where `tokens` end, on device or host; split off if need be. None unless all are cached."""

    def reads(self, node: Node, spread: int = 0) -> bool:
        """Whether the window KV needed to read up to `node` is there."""

    def add(
        self,
        tokens: array,
        namespace: Any,
        slots: torch.Tensor,
        priority: int,
        computed_start: int,
        chunked: bool = False,
    ) -> Inserted:
        """Make `tokens` resident in `slots` (int64), except for those that the tree has already.

        Tree slots that have lost their window KV take that of `slots`. A pass may still write to it, so both share it
        until the caller calls `take_lent` and then frees its slots.

        computed_start: for how many of the first tokens the caller has no window KV of its own.
        chunked: whether some of the KV is still to be computed, so that it must not be copied yet.
        """

    def num_lost(self, req: Any) -> int:
        """How many of the first tokens of a request's row that no node owns have lost their window KV."""

    def take_lent(self, slots: torch.Tensor) -> None:
        """Hand the window KV of `lent` slots over to the tree; no pass launched from now on uses these slots."""

    def slots_to(self, node: Node) -> list[torch.Tensor]:
        """The slots from the root to the end of `node`, in pieces."""

    def use(self, node: Node, priority: int | None = None, spread: int = 0) -> None:
        """Count a use of everything up to `node` for eviction.

        priority: of the request that uses it; None for a lookup, which makes KV recent but is not a hit.
        """

    def hold(self, node: Node, spread: int = 0) -> int:
        """Lock a readable node for one more holder; returns the change in the number of evictable tokens."""

    def let_go(self, node: Node, spread: int = 0) -> int:
        """Release one holder's lock; returns the same."""

    def remove(self, leaf: Node) -> torch.Tensor:
        """Evict a leaf from the device; the caller frees the returned slots.

        It leaves the tree unless the host has a copy.
        """

    def discardable(self, node: Node) -> bool:
        """Whether `node` is a leaf in all tiers, and neither locked nor being copied."""

    def discard(self, node: Node) -> list[torch.Tensor]:
        """Remove a discardable node from the tree and the host; the caller frees the returned slots."""

    def load(self, nodes: Sequence[Node]) -> bool:
        """Load `nodes`, which have no slots, and their evicted ancestors from the host before the next pass reads them,
        locked until then.

        Returns False and changes nothing if memory does not suffice for all.
        """

    def loading(self, node: Node) -> bool:
        """Whether the KV of `node` is being loaded from the host."""

    @property
    def device_memory(self) -> dict[str, int]:
        """The device's capacity in tokens (`size`), and how many of them are free (`free`)."""

    @property
    def window_memory(self) -> "WindowMemory | None":
        """The pool of window KV; None if all KV is in one pool."""

    def unlocked_windows(self, node: Node, spread: int = 0) -> int:
        """How many free or evictable tokens of window KV it would take to lock `node`."""

    @property
    def host_memory(self) -> dict[str, int] | None:
        """The host tier's capacity in tokens (`size`), and how many of them are free (`free`); None without one."""

    def fetch(self, chunk: ChunkSlice) -> bool:
        """Start fetching a chunk that is not cached from storage; returns whether it is on its way to the host."""

    def back_up(self, nodes: Iterable[Node]) -> None:
        """Copy to the host what its write policy wants of `nodes` and their ancestors, whose KV has been computed."""

"""What the host tier asks of the tree whose nodes it copies, and whom it tells."""

from array import array
from collections.abc import Iterable
from typing import Any, Protocol

Node = Any
"""With `id`, `parent`, `children` (a dictionary), `tokens`, `namespace`, `slots` (int64, None off the device), `hits`,
and `host`, which is the host tier's."""


class HostTree(Protocol):
    """What the host tier asks of the tree."""

    root: Node

    def lock(self, node: Node) -> Any:
        """Lock a node on the device for one more holder, and its ancestors."""

    def unlock(self, node: Node) -> Any:
        """Release one holder's lock."""

    def evictable_size(self) -> int:
        """The number of tokens on the device in nodes that are not locked."""

    def evict(self, num_tokens: int) -> int:
        """Evict leaves from the device and free their slots; returns how many."""

    def came(self, nodes: Iterable[Node]) -> None:
        """Nodes that were only on the host have got `slots`, parents first."""

    def drop(self, node: Node) -> None:
        """Remove a leaf that is in no tier."""

    def deepest(self, tokens: array, namespace: Any) -> tuple[Node, int]:
        """The node where what any tier has of `tokens` ends, split off if need be, and for how many tokens that is."""

    def sprout(self, node: Node, tokens: array, namespace: Any) -> Node:
        """A new leaf below `node`, in no tier yet."""

    def next_leaves(self, num_tokens: int) -> list[Node]:
        """The evictable leaves with the next given number of tokens to leave the device, in that order."""


class Watcher:
    """Is told what happens on the host; does nothing by itself."""

    def stored(self, node: Node) -> None:
        """`node` has got a copy, which may still be under way."""

    def removed(self, node: Node) -> None:
        """The copy of `node` is freed next."""

    def copied(self, node: Node) -> None:
        """The copy of `node` is complete."""

    def gave_up(self, num_tokens: int) -> None:
        """So many tokens' copies were given up while the device had them."""

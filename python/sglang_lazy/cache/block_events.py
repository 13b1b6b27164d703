"""Events of what is cached where, for followers, by the names of blocks that other caches of the server publish, too.

A block is one token's KV, named by a hash of it and all tokens before it. The KV of a chunk computed alone equals that
of a prompt that begins with it, so its hash is correct. It would be wrong for chunks that are private to a tenant or
were computed after a preamble, and for text after chunks: these have no events. Nor has leading text of tenants.

The same KV may be held several times: by another cache, as a chunk, as leading text of linked requests. Followers hear
of it with its first holder in a place (the device, the host), and again with its last.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_lazy.cache.host_copy import HostWatcher
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.parts import Part
from sglang_lazy.core.keys import Namespace

PLAIN_CHUNKS = Namespace("chunk", None, None)
_DIGEST = 32
"""Bytes of a token's hash. Events have the first eight."""


class Stored(NamedTuple):
    """Blocks, each of which follows the one before it, that are in a place from now on.

    parent: the block before them, None at the start.  tokens: theirs.  size: of a block, in tokens.
    origin: the event of another cache that this is a part of; None for one of ours.
    """

    place: Any
    blocks: list[int]
    parent: int | None
    tokens: list[int]
    size: int = 1
    origin: Any = None

    def parts(self, news: list[bool]) -> Iterator["Stored"]:
        """The runs of blocks that are news, each an event."""
        start = 0
        while True in news[start:]:
            start = news.index(True, start)
            end = news.index(False, start) if False in news[start:] else len(news)
            yield self._replace(
                blocks=self.blocks[start:end],
                tokens=self.tokens[start * self.size : end * self.size],
                parent=self.blocks[start - 1] if start else self.parent,
            )
            start = end


class Removed(NamedTuple):
    """Blocks that are no longer there.  origin: see `Stored`."""

    place: Any
    blocks: list[int]
    origin: Any = None

    def parts(self, news: list[bool]) -> Iterator["Removed"]:
        """The blocks of which that is news, as an event."""
        if gone := [block for block, is_news in zip(self.blocks, news, strict=True) if is_news]:
            yield self._replace(blocks=gone)


class BlockEvents(Part, HostWatcher):
    """The events of our tree, merged with those of another cache.

    A part of the tree, which tells it of what is computed and evicted; the host tier must tell it of copies and loads.
    Pages are single tokens.

    hashes: from tokens, and the hash of the one before them, empty for none: the hash of each, 32 bytes, one after the
        other.
    device, host: the names of these places in events.
    """

    def __init__(self, hashes: Callable[[array, bytes], bytes], device: Any, host: Any) -> None:
        self._hashes, self._device, self._host = hashes, device, host
        self.reset()

    def reset(self) -> None:
        """Both trees are emptied, of which the other has an event."""
        self._queue: list[Stored | Removed] = []  # our tree's
        self._digests: dict[int, bytes] = {}  # by node id
        # The blocks held in each place: by our tree, how many times, and by the other cache.
        self._own: dict[Any, Counter[int]] = defaultdict(Counter)
        self._plain: dict[Any, set[int]] = defaultdict(set)

    def plain_cleared(self) -> None:
        """The other cache is emptied."""
        self._plain.clear()

    def of_plain(self, event: Stored | Removed) -> Iterator[Stored | Removed]:
        """The parts of the other cache's event that are news."""
        own, held, blocks = self._own[event.place], self._plain[event.place], event.blocks
        if isinstance(event, Stored):
            news = [block not in held and not own[block] for block in blocks]
            held.update(blocks)
        else:  # it may not have told of all that it held
            news = [block in held and not own[block] for block in blocks]
            held.difference_update(blocks)
        yield from event.parts(news)

    def of_own(self) -> Iterator[Stored | Removed]:
        """Our tree's events since the last call, as far as they are news."""
        queue, self._queue = self._queue, []
        for event in queue:
            own, held, blocks = self._own[event.place], self._plain[event.place], event.blocks
            if isinstance(event, Stored):
                news = [block not in held and not own[block] for block in blocks]
                own.update(blocks)
            else:
                own.subtract(blocks)
                news = [block not in held and not own[block] for block in blocks]
                for block in blocks:
                    if not own[block]:
                        del own[block]
            yield from event.parts(news)

    # What the tree tells

    def added(self, end: Node, slots: torch.Tensor, num_present: int, start: int) -> torch.Tensor:
        new, count, node = [], len(slots), end
        while count > num_present:
            new.append(node)
            count, node = count - len(node), node.parent
        for node in reversed(new):
            self._has(node, self._device)
        return super().added(end, slots, num_present, start)

    def split(self, above: Node, node: Node) -> None:
        if (digests := self._digests.get(node.id)) is not None:
            place = len(above) * _DIGEST
            self._digests[above.id], self._digests[node.id] = digests[:place], digests[place:]

    def left_device(self, node: Node) -> bool:
        self._lost(node, self._device)
        return super().left_device(node)

    def left_tree(self, node: Node) -> None:
        self._digests.pop(node.id, None)

    # What the host tier tells

    def stored(self, node: Node) -> None:
        self._has(node, self._host)

    def loaded(self, node: Node) -> None:
        self._has(node, self._device)

    def removed(self, node: Node) -> None:
        self._lost(node, self._host)

    def _has(self, node: Node, place: Any) -> None:
        """Our tree holds the KV of `node` there from now on."""
        if _is_public(node):
            digests = self._digests[node.id] = self._digests_of(node)
            parent = _blocks(self._last_before(node))
            self._queue.append(Stored(place, _blocks(digests), parent[0] if parent else None, list(node.tokens)))

    def _lost(self, node: Node, place: Any) -> None:
        """Our tree no longer holds it there."""
        if _is_public(node):
            self._queue.append(Removed(place, _blocks(self._digests_of(node))))

    def _digests_of(self, node: Node) -> bytes:
        """The hashes of a node's tokens, one after the other."""
        if (digests := self._digests.get(node.id)) is not None:
            return digests
        return self._hashes(node.tokens, self._last_before(node))

    def _last_before(self, node: Node) -> bytes:
        """The hash of the token before a node, empty if there is none."""
        return b"" if node.parent.is_root else self._digests_of(node.parent)[-_DIGEST:]


def _is_public(node: Node) -> bool:
    return node.namespace in (PLAIN_CHUNKS, PLAIN_CHUNKS.leading)


def _blocks(digests: bytes) -> list[int]:
    """The names of blocks in events."""
    return np.frombuffer(digests, ">i8")[:: _DIGEST // 8].tolist()

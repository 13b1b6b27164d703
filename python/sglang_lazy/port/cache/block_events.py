"""KV events of both trees, as SGLang publishes them for prefixes (`--kv-events-config`).

SGLang identifies a token's KV by a hash of it and all tokens before it. The KV of a chunk computed alone equals that of
a prompt that begins with it, so its hash is correct. It would be wrong for chunks that are private to a tenant or were
computed after a preamble, and for text after chunks: these have no events. Nor has leading text of tenants.

The same KV may be held several times: by SGLang's cache, as a chunk, as leading text of linked requests. Followers hear
of it with its first holder in a place (the device, the host), and again with its last.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.utils import get_hash_str

from sglang_lazy.cache.host_copy import HostWatcher
from sglang_lazy.cache.node import Node
from sglang_lazy.cache.parts import Part
from sglang_lazy.core.keys import Namespace

PLAIN_CHUNKS = Namespace("chunk", None, None)
GPU, CPU = StorageMedium.GPU, StorageMedium.CPU
_DIGEST = 32
"""Bytes of a token's hash. Events have the first eight."""


class BlockEvents(Part, HostWatcher):
    """The events of our tree, merged with those of SGLang's cache.

    A part of the tree, which tells it of what is computed and evicted; the host tier must tell it of copies and loads.
    Pages are single tokens.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Both trees are emptied, of which SGLang's cache has an event."""
        self._queue: list[Any] = []  # our tree's
        self._digests: dict[int, bytes] = {}  # by node id
        # The blocks held in each place: by our tree, how many times, and by SGLang's cache.
        self._own: dict[Any, Counter[int]] = defaultdict(Counter)
        self._plain: dict[Any, set[int]] = defaultdict(set)

    def merge(self, plain: list[Any]) -> list[Any]:
        """The events that followers need, given those of SGLang's cache since the last call; takes our tree's."""
        queue, self._queue = self._queue, []
        events: list[Any] = []
        for event in plain:
            if isinstance(event, AllBlocksCleared):  # what was before does not matter
                self._plain.clear()
                events = [event]
            else:
                events += self._of_plain(event)
        for event in queue:
            events += self._of_own(event)
        return events

    def _of_plain(self, event: Any) -> Iterator[Any]:
        own, held, blocks = self._own[event.medium], self._plain[event.medium], event.block_hashes
        if isinstance(event, BlockStored):
            news = [block not in held and not own[block] for block in blocks]
            held.update(blocks)
            yield from _stored(event, news)
        else:  # it may not have told of all that it held
            yield from _removed(event, [block in held and not own[block] for block in blocks])
            held.difference_update(blocks)

    def _of_own(self, event: Any) -> Iterator[Any]:
        own, held, blocks = self._own[event.medium], self._plain[event.medium], event.block_hashes
        if isinstance(event, BlockStored):
            news = [block not in held and not own[block] for block in blocks]
            own.update(blocks)
            yield from _stored(event, news)
        else:
            own.subtract(blocks)
            yield from _removed(event, [block not in held and not own[block] for block in blocks])
            for block in blocks:
                if not own[block]:
                    del own[block]

    # What the tree tells

    def added(self, end: Node, slots: torch.Tensor, num_present: int, start: int) -> torch.Tensor:
        new, count, node = [], len(slots), end
        while count > num_present:
            new.append(node)
            count, node = count - len(node), node.parent
        for node in reversed(new):
            self._has(node, GPU)
        return super().added(end, slots, num_present, start)

    def split(self, above: Node, node: Node) -> None:
        if (digests := self._digests.get(node.id)) is not None:
            place = len(above) * _DIGEST
            self._digests[above.id], self._digests[node.id] = digests[:place], digests[place:]

    def left_device(self, node: Node) -> bool:
        self._lost(node, GPU)
        return super().left_device(node)

    def left_tree(self, node: Node) -> None:
        self._digests.pop(node.id, None)

    # What the host tier tells

    def stored(self, node: Node) -> None:
        self._has(node, CPU)

    def loaded(self, node: Node) -> None:
        self._has(node, GPU)

    def removed(self, node: Node) -> None:
        self._lost(node, CPU)

    def _has(self, node: Node, place: StorageMedium) -> None:
        """Our tree holds the KV of `node` there from now on."""
        if _is_public(node):
            digests = self._digests[node.id] = self._digests_of(node)
            parent = _blocks(self._last_before(node))
            self._queue.append(
                BlockStored(_blocks(digests), parent[0] if parent else None, list(node.tokens), 1, None, place)
            )

    def _lost(self, node: Node, place: StorageMedium) -> None:
        """Our tree no longer holds it there."""
        if _is_public(node):
            self._queue.append(BlockRemoved(_blocks(self._digests_of(node)), place))

    def _digests_of(self, node: Node) -> bytes:
        """SGLang's hashes of a node's tokens, one after the other."""
        if (digests := self._digests.get(node.id)) is not None:
            return digests
        before = self._last_before(node).hex() or None
        return bytes.fromhex("".join(get_hash_str(node.tokens, before, page_size=1)))

    def _last_before(self, node: Node) -> bytes:
        """The hash of the token before a node, empty if there is none."""
        return b"" if node.parent.is_root else self._digests_of(node.parent)[-_DIGEST:]


def _is_public(node: Node) -> bool:
    return node.namespace in (PLAIN_CHUNKS, PLAIN_CHUNKS.leading)


def _blocks(digests: bytes) -> list[int]:
    """The names of blocks in events."""
    return np.frombuffer(digests, ">i8")[:: _DIGEST // 8].tolist()


def _stored(event: BlockStored, news: list[bool]) -> Iterator[BlockStored]:
    """The runs of an event's blocks that are news, each an event of blocks that follow the one before it."""
    size, start = event.block_size, 0
    while True in news[start:]:
        start = news.index(True, start)
        end = news.index(False, start) if False in news[start:] else len(news)
        yield msgspec.structs.replace(
            event,
            block_hashes=event.block_hashes[start:end],
            token_ids=event.token_ids[start * size : end * size],
            parent_block_hash=event.block_hashes[start - 1] if start else event.parent_block_hash,
        )
        start = end


def _removed(event: BlockRemoved, news: list[bool]) -> Iterator[BlockRemoved]:
    """The same for blocks that are gone."""
    if gone := [block for block, is_news in zip(event.block_hashes, news, strict=True) if is_news]:
        yield msgspec.structs.replace(event, block_hashes=gone)

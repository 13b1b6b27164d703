"""Pinned chunks, whose KV stays on the device until the pin ends."""

import dataclasses
import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from sglang_lazy.chunks.catalog import CachedChunk, tenant_of
from sglang_lazy.chunks.tree import Node, Tree
from sglang_lazy.core.keys import ChunkKey, chunk_id
from sglang_lazy.core.refusal import Refusal

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Pin:
    """ttl: for how many seconds after a hit it holds; None for no end.
    until: when it ends, seconds since the epoch; None for never.
    hits: those of its chunk when `until` was set.
    """

    ttl: float | None
    until: float | None
    hits: int


class Pins:
    """The pins of one `ChunkStore`. A pin is one more lock on its chunk.

    All tenants share the budget. Where it is full, a tenant that would have less than another takes from the one that
    has most, whose oldest pin ends: of n tenants with pins each may have an nth of the budget, whatever the others do,
    and more where these leave it.

    The time is that of the messages that ask for something: it is the same on every tensor-parallel rank, as the clocks
    of the ranks are not.

    budget: how many tokens may be pinned.
    num_tokens: how many are, by tenant; what several chunks begin with counts for each.
    """

    def __init__(self, tree: Tree, budget: int):
        self.tree, self.budget = tree, budget
        self._numbers = itertools.count()  # of pins that end at the same time
        self.reset()

    def reset(self) -> None:
        """The tree has been emptied, and no chunk is pinned any more."""
        self.num_tokens: Counter[Hashable] = Counter()
        self._chunks: dict[ChunkKey, CachedChunk] = {}  # the one whose pin was set or renewed longest ago comes first
        self._ends: list[tuple[float, int, CachedChunk, Pin]] = []  # a heap, also of pins that have been replaced

    def __len__(self) -> int:
        """How many chunks are pinned, each of them one lock on the tree."""
        return len(self._chunks)

    def add(self, chunks: Sequence[CachedChunk], ttl: float | None, now: float) -> None:
        """Pin all of these cached chunks of one tenant, from now on for `ttl` seconds; Refusal says why none is."""
        new = [chunk for chunk in chunks if chunk.pin is None]
        yielding = self._yielding_to(new)
        locked: list[Node] = []
        nodes: list[Node] = [chunk.node for chunk in new]
        for node in sorted(nodes, key=lambda node: node.evicted):  # loading evicts, so first those that must stay
            if node.evicted and not self.tree.load(node):
                for other in locked:
                    self.tree.unlock(other)
                raise Refusal("pin_room", "the device has no room for it now")
            self.tree.lock(node)
            locked.append(node)
        for chunk in chunks:
            if chunk.pin is None:
                self.num_tokens[_tenant(chunk)] += chunk.num_tokens
            self._set(chunk, ttl, now)
        for chunk in yielding:
            self._end(chunk, "another tenant has less pinned")

    def _yielding_to(self, new: Sequence[CachedChunk]) -> list[CachedChunk]:
        """The chunks whose pins have to end for these. Raises Refusal if their tenant would have most pinned then."""
        num_tokens, ending = self.num_tokens.copy(), []
        for chunk in new:
            num_tokens[_tenant(chunk)] += chunk.num_tokens
        oldest: dict[Hashable, Iterator[CachedChunk]] = {}
        while new and num_tokens.total() > self.budget:
            largest = _largest(num_tokens)
            if num_tokens[_tenant(new[0])] == num_tokens[largest]:
                raise Refusal("pin_budget", f"no more than {self.budget} tokens can be pinned (--lazy-max-pinned)")
            chunk = next(oldest.setdefault(largest, self._oldest_of(largest)))
            num_tokens[largest] -= chunk.num_tokens
            ending.append(chunk)
        return ending

    def _set(self, chunk: CachedChunk, ttl: float | None, now: float) -> None:
        chunk.pin = Pin(ttl, None if ttl is None else now + ttl, chunk.hits)
        self._chunks.pop(chunk.key, None)
        self._chunks[chunk.key] = chunk
        if chunk.pin.until is not None:
            if len(self._ends) > 2 * len(self._chunks):
                self._ends = [end for end in self._ends if end[2].pin is end[3]]
                heapq.heapify(self._ends)
            heapq.heappush(self._ends, (chunk.pin.until, next(self._numbers), chunk, chunk.pin))

    def remove(self, chunk: CachedChunk) -> None:
        """End the pin of a chunk, if it has one."""
        if self._chunks.pop(chunk.key, None) is not None:
            chunk.pin = None
            self.num_tokens -= Counter({_tenant(chunk): chunk.num_tokens})  # who has none left is dropped
            self.tree.unlock(chunk.node)

    def expire(self, now: float) -> float | None:
        """End the pins whose time is over; returns in how many seconds the next one may be, None if none will.

        The time of a chunk that has had hits meanwhile begins anew.
        """
        while self._ends:
            until, _, chunk, pin = self._ends[0]
            if chunk.pin is pin and until > now:
                return until - now
            heapq.heappop(self._ends)
            if chunk.pin is not pin:
                continue
            if chunk.hits > pin.hits:
                self._set(chunk, pin.ttl, now)
            else:
                self.remove(chunk)
        return None

    def give_up(self) -> None:
        """End the pin, of the tenant that has most pinned, that was set or used longest ago."""
        self._end(next(self._oldest_of(_largest(self.num_tokens))), "a running request needs its memory")

    def _oldest_of(self, tenant: Hashable) -> Iterator[CachedChunk]:
        """The pinned chunks of a tenant, the one that was pinned or used longest ago first."""
        return (chunk for chunk in self._chunks.values() if _tenant(chunk) == tenant)

    def _end(self, chunk: CachedChunk, reason: str) -> None:
        logger.warning("sglang-lazy: chunk %s is pinned no longer: %s", chunk_id(chunk.key.tokens), reason)
        self.remove(chunk)


def _tenant(chunk: CachedChunk) -> Hashable:
    return tenant_of(chunk.key.namespace)


def _largest(num_tokens: Counter[Hashable]) -> Hashable:
    """Who has most pinned; of several the one that began first, on every rank the same."""
    return max(num_tokens, key=num_tokens.__getitem__)

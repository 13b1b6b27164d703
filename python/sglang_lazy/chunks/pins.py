"""Pins, which keep the KV of chunks on the device until they end."""

import dataclasses
import heapq
import itertools
import logging
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from sglang_lazy.cache.node import Node
from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.chunks.store import ChunkStore
from sglang_lazy.core.keys import ChunkKey, chunk_id
from sglang_lazy.core.refusal import Refusal

logger = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class Pin:
    """A pin on one chunk.

    ttl: how many seconds it lasts after the last hit; None for no limit.
    until: when it ends, seconds since the epoch; None for never.
    hits: the chunk's hits when `until` was set.
    name: what the log calls the chunk besides its id, None for nothing.
    """

    ttl: float | None
    until: float | None
    hits: int
    name: str | None = None


class Pins:
    """The pins of one `ChunkStore`. A pin is one more lock on its chunk.

    All tenants share the budget. When it is full, a new pin ends the oldest pin of the tenant that has most pinned,
    unless the new pin's tenant would have most itself. So each of n tenants with pins can have 1/n of the budget,
    whatever the others do, and more if they leave it.

    The current time comes with the messages, so that it is the same on every tensor-parallel rank.

    budget: how many tokens may be pinned.  max_states: how many chunks, if each has a state of recurrent layers.
    num_tokens: how many tokens each tenant has pinned; a beginning that several chunks share counts for each.
    """

    def __init__(self, store: ChunkStore, budget: int, max_states: float = math.inf):
        self.store, self.tree, self.budget, self.max_states = store, store.tree, budget, max_states
        self._numbers = itertools.count()  # of pins that end at the same time
        self.reset()

    def reset(self) -> None:
        """Forget all pins: the tree has been emptied."""
        self.num_tokens: Counter[Hashable] = Counter()
        self._chunks: dict[ChunkKey, CachedChunk] = {}  # the least recently set or renewed pin first
        self._ends: list[tuple[float, int, CachedChunk, Pin]] = []  # a heap, which may hold pins replaced since

    def __len__(self) -> int:
        """The number of pinned chunks, each of which is one lock on the tree."""
        return len(self._chunks)

    def add(self, chunks: Sequence[CachedChunk], ttl: float | None, now: float, name: str | None = None) -> None:
        """Pin cached chunks of one tenant for `ttl` seconds. Raises Refusal, and pins none, if they do not fit.

        name: of `Pin`.
        """
        new = [chunk for chunk in chunks if chunk.pin is None]
        yielding = self._yielding_to(new)
        locked: list[Node] = []
        nodes = [chunk.node for chunk in new if chunk.node is not None]
        # Loading evicts, so lock the resident ones first.
        for node in sorted(nodes, key=lambda node: node.slots is None):
            if node.slots is None and not self.store.load([node]):
                for other in locked:
                    self.tree.unlock(other)
                raise Refusal("pin_room", "the device has no room for it now")
            self.tree.lock(node)
            locked.append(node)
        for chunk in chunks:
            if chunk.pin is None:
                self.num_tokens[chunk.tenant] += chunk.num_tokens
            self._set(chunk, ttl, now, name)
        for chunk in yielding:
            self._end(chunk, "another tenant has less pinned")

    def _yielding_to(self, new: Sequence[CachedChunk]) -> list[CachedChunk]:
        """The chunks whose pins must end for `new`. Raises Refusal if its tenant would then have most pinned."""
        num_tokens, ending = self.num_tokens.copy(), list[CachedChunk]()
        for chunk in new:
            num_tokens[chunk.tenant] += chunk.num_tokens
        oldest: dict[Hashable, Iterator[CachedChunk]] = {}
        num_states = len(self) + len(new)
        while new and (num_tokens.total() > self.budget or num_states - len(ending) > self.max_states):
            largest = _largest(num_tokens)
            if num_tokens[new[0].tenant] == num_tokens[largest]:
                most = f"{self.budget} tokens" + (
                    f" or {self.max_states} states" if math.isfinite(self.max_states) else ""
                )
                raise Refusal("pin_budget", f"no more than {most} can be pinned (--lazy-max-pinned)")
            chunk = next(oldest.setdefault(largest, self._oldest_of(largest)))
            num_tokens[largest] -= chunk.num_tokens
            ending.append(chunk)
        return ending

    def _set(self, chunk: CachedChunk, ttl: float | None, now: float, name: str | None) -> None:
        chunk.pin = Pin(ttl, None if ttl is None else now + ttl, chunk.hits, name)
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
            self.num_tokens -= Counter({chunk.tenant: chunk.num_tokens})  # drops tenants without pins
            assert chunk.node is not None, "a pin is a lock"
            self.tree.unlock(chunk.node)

    def expire(self, now: float) -> float | None:
        """End the pins that have expired; returns in how many seconds the next one may expire, None if none will.

        A pin whose chunk has had hits since is renewed instead.
        """
        while self._ends:
            until, _, chunk, pin = self._ends[0]
            if chunk.pin is pin and until > now:
                return until - now
            heapq.heappop(self._ends)
            if chunk.pin is not pin:
                continue
            if chunk.hits > pin.hits:
                self._set(chunk, pin.ttl, now, pin.name)
            else:
                self.remove(chunk)
        return None

    def give_up(self) -> None:
        """End the least recently set or renewed pin of the tenant that has most pinned."""
        self._end(next(self._oldest_of(_largest(self.num_tokens))), "a running request needs its memory")

    def _oldest_of(self, tenant: Hashable) -> Iterator[CachedChunk]:
        """The pinned chunks of a tenant, the least recently set or renewed pin first."""
        return (chunk for chunk in self._chunks.values() if chunk.tenant == tenant)

    def _end(self, chunk: CachedChunk, reason: str) -> None:
        title = chunk_id(chunk.key.tokens) + (f" ({chunk.pin.name})" if chunk.pin.name is not None else "")
        logger.warning("sglang-lazy: chunk %s is pinned no longer: %s", title, reason)
        self.remove(chunk)


def _largest(num_tokens: Counter[Hashable]) -> Hashable:
    """The tenant that has most pinned; among equals the one with the oldest entry, the same on every rank."""
    return max(num_tokens, key=num_tokens.__getitem__)

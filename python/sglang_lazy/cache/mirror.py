"""The ages of a prefix tree that tells none.

Two trees that share one pool stay close to one LRU order if evictions come from whichever holds the older leaf. For a
tree that cannot say how old its leaves are, this keeps the prompts that went into it, as blocks in order of use.
"""

import collections
from array import array
from collections.abc import Callable, Hashable, Iterator
from typing import Protocol

import xxhash

BLOCK = 256
"""Tokens in a block: a million cached tokens are 4,000 entries; a prompt of 8,192 tokens costs 32 hashes."""


_Name = int | tuple[int, int]


class Mirror:
    """The least recently used order of the tokens in another tree, in blocks of each prompt's prefix.

    A block is named by a hash of itself and all before it, so prompts share the blocks of their common beginning. The
    rest of a prompt, which fills no block, is named by the block before it and its first token: without it a tree of
    short prompts would seem empty. Hashes are the same in every process, so all tensor-parallel ranks, which see the
    same prompts, see the same ages.
    """

    def __init__(self) -> None:
        self._blocks: collections.OrderedDict[_Name, tuple[int, int]] = collections.OrderedDict()  # age, tokens
        self._num_tokens = 0

    def touch(self, tokens: array, namespace: Hashable, now: int) -> None:
        """Count a use of `tokens`, all of which the tree holds now.

        namespace: of the prompt; equal tokens in different namespaces are different text.
        now: the time of use, a number that grows.
        """
        chain = [xxhash.xxh3_64_intdigest(repr(namespace).encode())]
        raw, end = memoryview(tokens), len(tokens) // BLOCK * BLOCK
        for start in range(0, end, BLOCK):
            chain.append(xxhash.xxh3_64_intdigest(raw[start : start + BLOCK], seed=chain[-1]))
        # A tree gives its leaves first: the end of a prompt is older than its beginning.
        if len(tokens) > end:
            self._put((chain[-1], tokens[end]), now, len(tokens) - end)
        for name, before in zip(chain[:0:-1], chain[-2::-1], strict=True):
            end -= BLOCK
            if name not in self._blocks:
                self._drop((before, tokens[end]))  # the end of a prompt that has grown
            self._put(name, now, BLOCK)

    def oldest(self) -> Iterator[tuple[int, int]]:
        """The blocks, the least recently used first: when each was last used, and its number of tokens."""
        return iter(self._blocks.values())

    def gave(self, num_tokens: int, num_left: int) -> None:
        """The tree has evicted `num_tokens`, and has `num_left`: forget as many of the oldest.

        Blocks that begin alike count more often here than in the tree; what exceeds `num_left` is forgotten, too.
        """
        aim = min(self._num_tokens - num_tokens, num_left)
        while self._blocks:
            name, (_, count) = next(iter(self._blocks.items()))
            if self._num_tokens - count < aim:
                break
            self._drop(name)

    def reset(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._num_tokens = 0

    def _put(self, name: _Name, now: int, count: int) -> None:
        """Make a block the last used."""
        self._drop(name)
        self._blocks[name] = now, count
        self._num_tokens += count

    def _drop(self, name: _Name) -> None:
        if (dropped := self._blocks.pop(name, None)) is not None:
            self._num_tokens -= dropped[1]


class AgedTree(Protocol):
    """A tree that knows the ages of its leaves, by the clock of the mirror; see `RadixTree`."""

    @property
    def num_evictable(self) -> int: ...

    def oldest(self) -> int | None: ...

    def evict(self, num_tokens: int) -> int: ...


def evict_older(num_tokens: int, tree: AgedTree, mirror: Mirror, give: Callable[[int], int]) -> int:
    """Evict `num_tokens` from two trees in one order, or all that they have; returns how many `tree` gave.

    The share of the mirrored tree is added up along the mirror and asked for at once, since an eviction costs it
    milliseconds, however small. If it has less to give, since running requests hold it, `tree` gives the rest. Waiting
    requests of `tree` lose their locks only when neither has more.

    give: makes the mirrored tree evict so many tokens; returns how many it did, and tells the mirror.
    """
    own = share = given = 0
    for age, count in mirror.oldest():
        while own + share < num_tokens and (oldest := tree.oldest()) is not None and oldest < age:
            own += tree.evict(1)
        if own + share >= num_tokens:
            break
        share += count
    if (share := min(share, num_tokens - own)) > 0:
        given = give(share)
    if (missing := num_tokens - own - given) > 0:
        own += tree.evict(min(missing, tree.num_evictable))
    if (missing := num_tokens - own - given) > 0:  # what the mirror has forgotten
        given += give(missing)
    if (missing := num_tokens - own - given) > 0:
        own += tree.evict(missing)
    return own

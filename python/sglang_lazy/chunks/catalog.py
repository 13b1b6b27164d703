"""The catalogue of chunks: which ones a tenant has, without looking at those of others, nor at all of them at once."""

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from sglang_lazy.chunks.tree import Node
from sglang_lazy.core.keys import ChunkKey, Namespace, chunk_id

SORTS = {"last_use": "last_use", "hits": "hits", "tokens": "num_tokens", "created": None}
"""What a list may be sorted by, and the field of `CachedChunk` that it is; None for the serial number."""
STATES = ("pending", "fetching", "host", "loading", "resident")
MAX_LIMIT = 1000
MIN_DIGITS = 16
PIECE = 4000
"""Chunks that are looked at for a page at once, which takes a few milliseconds."""
_SHARE = 256
"""Serial numbers that are kept together."""


@dataclasses.dataclass(eq=False, slots=True)
class CachedChunk:
    """node: where the chunk ends in the tree; None for one that is not cached.
    serial: grows with the time at which the chunk became known.
    own_serial: the same, counted for each tenant, which must not learn how many chunks others have.
    hits: how many prompts found it cached.
    last_use: time of day, seconds since the epoch; only for reports, since ranks differ in it.
    segment_ids: by the ranges of it that prompts keep.
    scores: float32 [num_tokens], what a policy has measured of its tokens.
    stored: whether storage has it; kept by the tree.
    pin: its `Pin`, None for most; kept by `Pins`.
    """

    key: ChunkKey
    node: Node | None
    num_tokens: int
    serial: int
    own_serial: int
    last_use: float
    hits: int = 0
    segment_ids: dict[tuple, int] = dataclasses.field(default_factory=dict)
    scores: np.ndarray | None = None
    stored: bool = False
    pin: Any = None


def tenant_of(namespace: Namespace) -> Hashable:
    """Whose chunks these are: the salt, None for the shared ones. Those under an `extra_key` beside it are nobody's."""
    salt = namespace.cache_salt
    return salt if namespace.own_key == salt else (namespace.own_key, salt)


class Series:
    """Chunks by serial number, ascending, to be walked in pieces while chunks come and go."""

    def __init__(self) -> None:
        self._shares: dict[int, dict[int, CachedChunk]] = {}

    def add(self, serial: int, chunk: CachedChunk) -> None:
        """`serial` is greater than all before it."""
        self._shares.setdefault(serial // _SHARE, {})[serial] = chunk

    def remove(self, serial: int) -> None:
        share = self._shares[serial // _SHARE]
        del share[serial]
        if not share:
            del self._shares[serial // _SHARE]

    def __bool__(self) -> bool:
        return bool(self._shares)

    def piece(self, start: int, size: int) -> tuple[list[CachedChunk], int | None]:
        """The chunks from `start` on, `size` of them or a few more, and where the next piece starts; None at the end.

        start: 0, or what a piece before gave.
        """
        chunks: list[CachedChunk] = []
        numbers = list(self._shares)
        for number in numbers[bisect.bisect_left(numbers, start) :]:
            if len(chunks) >= size:
                return chunks, number
            chunks += self._shares[number].values()
        return chunks, None


class Catalog:
    """The cached chunks by tenant.

    chunks: all of them; kept by the store.
    state_of: says in which state a chunk is, by its name in `STATES`.
    """

    def __init__(self, chunks: Mapping[ChunkKey, CachedChunk], state_of: Callable[[CachedChunk], str]):
        self._chunks, self._state_of = chunks, state_of
        self._serials = itertools.count()
        self._own_serials: defaultdict[Hashable, Iterator[int]] = defaultdict(itertools.count)
        self._everybody, self._tenants = Series(), defaultdict[Hashable, Series](Series)
        self._by_id: dict[Hashable, dict[ChunkKey, CachedChunk]] = {}

    def new(self, key: ChunkKey, node: Node | None, num_tokens: int, now: float) -> CachedChunk:
        """A chunk that has become known; not yet in the catalogue."""
        own_serial = next(self._own_serials[tenant_of(key.namespace)])
        return CachedChunk(key, node, num_tokens, next(self._serials), own_serial, now)

    def add(self, chunk: CachedChunk) -> None:
        tenant = self._owner(chunk)
        self._everybody.add(chunk.serial, chunk)
        self._tenants[tenant].add(chunk.own_serial, chunk)
        self._by_id.setdefault((tenant, chunk_id(chunk.key.tokens)), {})[chunk.key] = chunk

    def remove(self, chunk: CachedChunk) -> None:
        tenant = self._owner(chunk)
        self._everybody.remove(chunk.serial)
        self._tenants[tenant].remove(chunk.own_serial)
        if not self._tenants[tenant]:
            del self._tenants[tenant], self._own_serials[tenant]
        same = self._by_id[tenant, chunk_id(chunk.key.tokens)]
        del same[chunk.key]
        if not same:
            del self._by_id[tenant, chunk_id(chunk.key.tokens)]

    def __iter__(self) -> Iterator[CachedChunk]:
        return iter(self._chunks.values())

    def piece(self, tenant: Hashable, everybody: bool, start: int, size: int) -> tuple[list[CachedChunk], int | None]:
        """Some chunks of a tenant, or of all tenants, in the order in which they became known: see `Series.piece`."""
        series = self._everybody if everybody else self._tenants.get(tenant)
        return ([], None) if series is None else series.piece(start, size)

    @staticmethod
    def _owner(chunk: CachedChunk) -> Hashable:
        return tenant_of(chunk.key.namespace)

    def find(self, tenant: Hashable, prefix: str, more: Iterable[CachedChunk] = ()) -> list[CachedChunk]:
        """The chunks of a tenant whose digest begins with these hexadecimal digits: a chunk may be cached several
        times, behind different preambles."""
        own = [chunk for chunk in more if self._owner(chunk) == tenant]
        chunks = itertools.chain(self._by_id.get((tenant, prefix[:MIN_DIGITS]), {}).values(), own)
        return [chunk for chunk in chunks if chunk.key.tokens.hex().startswith(prefix)]

    def page(
        self,
        tenant: Hashable,
        everybody: bool,
        sort: str,
        descending: bool,
        limit: int,
        after: tuple[float, int] | None,
        state: str | None,
        start: int = 0,
        more: Iterable[CachedChunk] = (),
    ) -> tuple[int, list[CachedChunk], list[tuple[float, int]], int | None]:
        """Of one piece of the chunks: how many there are, those that are on the page if no other piece has better ones,
        in order, and their places: what each is sorted by, and its serial number. Last, where the next piece starts.

        everybody: those of all tenants.  sort: one of `SORTS`.  limit: of the page.
        after: the place of the last chunk of the page before.
        state: one of `STATES`, if only those in it are wanted.  start: as in `piece`.
        more: chunks that are known, but not cached; they belong to the first piece.
        """
        serial_name = "serial" if everybody else "own_serial"
        serial = attrgetter(serial_name)
        chunks, following = self.piece(tenant, everybody, start, PIECE)
        if not start:
            chunks = sorted((c for c in more if everybody or self._owner(c) == tenant), key=serial) + chunks
        if state is not None:
            chunks = [chunk for chunk in chunks if self._state_of(chunk) == state]
        total = len(chunks)
        sign = -1 if descending else 1
        field = attrgetter(SORTS[sort] or serial_name)
        values = sign * np.fromiter(map(field, chunks), np.float64, total)
        rest = np.arange(total)
        if after is not None:
            value, place = sign * after[0], bisect.bisect_left(chunks, after[1], key=serial)
            behind = rest < place if descending else rest >= bisect.bisect_right(chunks, after[1], key=serial)
            rest = np.flatnonzero((values > value) | ((values == value) & behind))
        if len(rest) > limit:  # all that sort before or with the last one of the page
            last = np.partition(values[rest], limit - 1)[limit - 1]
            rest = rest[values[rest] <= last]
        order = rest[np.lexsort((sign * rest, values[rest]))][:limit]
        page = [chunks[i] for i in order.tolist()]
        places = [(value, serial(chunk)) for value, chunk in zip((sign * values[order]).tolist(), page, strict=True)]
        return total, page, places, following

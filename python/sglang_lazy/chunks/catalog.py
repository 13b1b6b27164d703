"""The catalogue of cached chunks by tenant, for scanning them."""

import bisect
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import numpy as np

from sglang_lazy.cache.node import Node
from sglang_lazy.core.keys import ChunkKey, Namespace, chunk_id

SORTS = {"last_use": "last_use", "hits": "hits", "tokens": "num_tokens", "created": None}
"""Sort keys of lists, and the field of `CachedChunk` for each; None for the serial number."""
STATES = ("pending", "fetching", "host", "loading", "resident")
MAX_LIMIT = 1000
MIN_DIGITS = 16
AT_ONCE = 4000
"""How many chunks to look through at once for a page, which takes a few milliseconds."""
_SHARE = 256
"""How many serial numbers share a dictionary of `Series`."""


@dataclasses.dataclass(eq=False, slots=True)
class CachedChunk:
    """A chunk known to the cache.

    node: the tree node where it ends; None if it is not cached.
    serial: increases in the order in which chunks become known.
    tenant: `tenant_of` its namespace.
    own_serial: the same, counted per tenant, so that none learns how many chunks others have.
    hits: how many prompts found it cached.
    last_use: seconds since the epoch; only for reports, since clocks differ between ranks.
    scores: float32 [num_tokens], measured by a policy for each token.
    stored: whether storage has it, None if storage has not been asked; set by the tree.
    pin: its `Pin`, if any; set by `Pins`.
    """

    key: ChunkKey
    node: Node | None
    num_tokens: int
    serial: int
    tenant: Hashable
    own_serial: int
    last_use: float
    hits: int = 0
    scores: np.ndarray | None = None
    stored: bool | None = None
    pin: Any = None


def tenant_of(namespace: Namespace) -> Hashable:
    """The tenant of a namespace: its salt, or None if shared.

    A different `extra_key` gives a tenant that matches no client.
    """
    salt = namespace.cache_salt
    return salt if namespace.own_key is None else (namespace.own_key, salt)


class Series:
    """Chunks in order of serial number, scanned a few at a time while chunks come and go.

    serials: the serial numbers of chunks to come.
    """

    def __init__(self) -> None:
        self.serials = itertools.count()
        self._shares: dict[int, dict[int, CachedChunk]] = {}

    def add(self, serial: int, chunk: CachedChunk) -> None:
        """Add a chunk whose `serial` is greater than all before it."""
        self._shares.setdefault(serial // _SHARE, {})[serial] = chunk

    def remove(self, serial: int) -> None:
        number = serial // _SHARE
        share = self._shares[number]
        del share[serial]
        if not share:
            del self._shares[number]

    def __bool__(self) -> bool:
        return bool(self._shares)

    def scan(self, start: int, size: int) -> tuple[list[CachedChunk], int | None]:
        """The chunks from `start` on, `size` of them or a few more, and where the next ones start, None at the end.

        start: 0, or the value returned with the previous ones.
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

    chunks: all cached chunks; maintained by the store.
    state_of: returns a chunk's state, one of `STATES`.
    """

    def __init__(self, chunks: Mapping[ChunkKey, CachedChunk], state_of: Callable[[CachedChunk], str]):
        self._chunks, self._state_of = chunks, state_of
        self._everybody, self._tenants = Series(), defaultdict[Hashable, Series](Series)
        self._by_id = defaultdict[Hashable, list[CachedChunk]](list)

    def add(self, key: ChunkKey, node: Node, num_tokens: int, now: float) -> CachedChunk:
        """Enter a chunk, with the next serial numbers; the caller adds it to `chunks`."""
        tenant = tenant_of(key.namespace)
        everybody, own = self._everybody, self._tenants[tenant]
        chunk = CachedChunk(key, node, num_tokens, next(everybody.serials), tenant, next(own.serials), now)
        everybody.add(chunk.serial, chunk)
        own.add(chunk.own_serial, chunk)
        self._by_id[tenant, chunk_id(key.tokens)].append(chunk)
        return chunk

    def remove(self, chunk: CachedChunk) -> None:
        name = chunk.tenant, chunk_id(chunk.key.tokens)
        own, alike = self._tenants[chunk.tenant], self._by_id[name]
        self._everybody.remove(chunk.serial)
        own.remove(chunk.own_serial)
        if not own:
            del self._tenants[chunk.tenant]
        alike.remove(chunk)
        if not alike:
            del self._by_id[name]

    def __iter__(self) -> Iterator[CachedChunk]:
        return iter(self._chunks.values())

    def scan(self, tenant: Hashable, everybody: bool, start: int, size: int) -> tuple[list[CachedChunk], int | None]:
        """Some chunks of a tenant or of all tenants, in the order in which they became known; see `Series.scan`."""
        series = self._everybody if everybody else self._tenants.get(tenant)
        return ([], None) if series is None else series.scan(start, size)

    def find(self, tenant: Hashable, prefix: str, more: Iterable[CachedChunk] = ()) -> list[CachedChunk]:
        """The chunks of a tenant whose digest begins with these hexadecimal digits. One text may be cached several
        times, after different preambles."""
        own = [chunk for chunk in more if chunk.tenant == tenant]
        chunks = itertools.chain(self._by_id.get((tenant, prefix[:MIN_DIGITS]), ()), own)
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
        """Look through some of the chunks for a page; the caller merges the pages of all.

        Returns the number of these chunks, the first `limit` of them in sort order, the place of each (sort value and
        serial number), and where the next ones start.

        everybody: include all tenants.  sort: one of `SORTS`.  limit: chunks per page.
        after: the place of the last chunk on the previous page.
        state: include only chunks in this state, one of `STATES`.  start: as in `scan`.
        more: chunks that are known but not cached; they belong to the first ones.
        """
        serial_name = "serial" if everybody else "own_serial"
        serial = attrgetter(serial_name)
        chunks, following = self.scan(tenant, everybody, start, AT_ONCE)
        if not start:
            chunks = sorted((c for c in more if everybody or c.tenant == tenant), key=serial) + chunks
        if state is not None:
            chunks = [chunk for chunk in chunks if self._state_of(chunk) == state]
        total = len(chunks)
        sign = -1 if descending else 1
        field = attrgetter(SORTS[sort] or serial_name)
        values = sign * np.fromiter(map(field, chunks), np.float64, total)
        rest = np.arange(total)
        if after is not None:
            value, place = sign * after[0], bisect.bisect_left(chunks, after[1], key=serial)
            later = rest < place if descending else rest >= bisect.bisect_right(chunks, after[1], key=serial)
            rest = np.flatnonzero((values > value) | ((values == value) & later))
        if len(rest) > limit:  # keep those that sort up to the page's last value
            last = np.partition(values[rest], limit - 1)[limit - 1]
            rest = rest[values[rest] <= last]
        order = rest[np.lexsort((sign * rest, values[rest]))][:limit]
        page = [chunks[i] for i in order.tolist()]
        places = [(value, serial(chunk)) for value, chunk in zip((sign * values[order]).tolist(), page, strict=True)]
        return total, page, places, following

"""The catalogue of chunks: which ones a tenant has, page by page, without looking at those of others."""

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


class Catalog:
    """The cached chunks by tenant.

    chunks: all of them, in the order in which they became known; kept by the store.
    state_of: says in which state a chunk is, by its name in `STATES`.  any_loading: whether any is on the way from the
        host.
    """

    def __init__(
        self,
        chunks: Mapping[ChunkKey, CachedChunk],
        state_of: Callable[[CachedChunk], str],
        any_loading: Callable[[], bool],
    ):
        self._chunks, self._state_of, self._any_loading = chunks, state_of, any_loading
        self._serials = itertools.count()
        self._own_serials: defaultdict[Hashable, Iterator[int]] = defaultdict(itertools.count)
        self._tenants: dict[Hashable, dict[ChunkKey, CachedChunk]] = {}
        self._by_id: dict[Hashable, dict[ChunkKey, CachedChunk]] = {}

    def new(self, key: ChunkKey, node: Node | None, num_tokens: int, now: float) -> CachedChunk:
        """A chunk that has become known; not yet in the catalogue."""
        own_serial = next(self._own_serials[tenant_of(key.namespace)])
        return CachedChunk(key, node, num_tokens, next(self._serials), own_serial, now)

    def add(self, chunk: CachedChunk) -> None:
        tenant = self._owner(chunk)
        self._tenants.setdefault(tenant, {})[chunk.key] = chunk
        self._by_id.setdefault((tenant, chunk_id(chunk.key.tokens)), {})[chunk.key] = chunk

    def remove(self, chunk: CachedChunk) -> None:
        tenant = self._owner(chunk)
        for index, name in ((self._tenants, tenant), (self._by_id, (tenant, chunk_id(chunk.key.tokens)))):
            chunks = index[name]
            del chunks[chunk.key]
            if not chunks:
                del index[name]
        if tenant not in self._tenants:
            del self._own_serials[tenant]

    def __iter__(self) -> Iterator[CachedChunk]:
        return iter(self._chunks.values())

    def of(self, tenant: Hashable, everybody: bool) -> list[CachedChunk]:
        """The chunks of a tenant, or of all tenants, in the order in which they became known."""
        return list((self._chunks if everybody else self._tenants.get(tenant, {})).values())

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
        more: Iterable[CachedChunk] = (),
    ) -> tuple[int, list[CachedChunk], list[tuple[float, int]]]:
        """How many chunks there are, those of one page, in order, and their places: what each is sorted by, and its
        serial number.

        everybody: those of all tenants.  sort: one of `SORTS`.  limit: of the page.
        after: the place of the last chunk of the page before.
        state: one of `STATES`, if only those in it are wanted.  more: chunks that are known, but not cached.

        Numbers are gathered in NumPy and only the page is looked at: all else would take longer than a batch may wait.
        """
        serial_name = "serial" if everybody else "own_serial"
        serial = attrgetter(serial_name)
        extra = sorted((c for c in more if everybody or self._owner(c) == tenant), key=serial)
        chunks = extra + self.of(tenant, everybody)  # by serial: a dictionary keeps the order of insertion
        if state is not None:
            if state in ("host", "resident", "loading"):  # most need no closer look
                chunks = [c for c in chunks if c.node is not None and (c.node.value is None) == (state == "host")]
            if state not in ("host", "resident") or (state == "resident" and self._any_loading()):
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
        return (
            total,
            page,
            [(value, serial(chunk)) for value, chunk in zip((sign * values[order]).tolist(), page, strict=True)],
        )

"""The scheduler's side of the `/chunks` routes."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.chunks.pins import Pins
from sglang_lazy.chunks.reports import AT_ONCE, chunks_under_way, describe_chunk, state_of, survey_chunks
from sglang_lazy.chunks.row_cache import RowCache
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.refusal import Refusal


class ChunkControl:
    """Lists, pins and deletes chunks; every tensor-parallel rank handles the same messages.

    In a scan of all chunks, the caller sends a message for a few at a time, so that batches run in between: `starts`
    says where each data-parallel rank continues (None: all at the beginning), and the answer's `next` where the
    following ones start, None at the end.

    dp_rank: the scheduler's data-parallel rank, set by the port.
    """

    def __init__(self, rows: RowCache, pins: Pins):
        self.rows, self.store, self.pins = rows, rows.store, pins
        self.dp_rank = 0

    def handle(self, verb: str, arguments: Mapping[str, Any], now: float) -> dict[str, Any]:
        """The answer to one message. Expired pins end first, except for surveys, which send many messages.

        arguments: checked by the sender.  now: the sender's time, seconds since the epoch.
        """
        if verb != "survey":
            self.pins.expire(now)
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "page": self.page,
            "get": self.get,
            "survey": self.survey,
            "delete": self.delete,
            "pin": functools.partial(self.pin, now=now),
            "expire": functools.partial(self.expire, now),
        }
        return verbs[verb](**arguments)

    def page(self, starts: Mapping[int, int] | None = None, **wanted: Any) -> dict[str, Any]:
        """The page of some of the chunks, with the place of each and the number of them all.

        wanted: the other arguments of `Catalog.page`.
        """
        if (start := self._start(starts)) is None:
            return {}
        more = chunks_under_way(self.store)
        total, chunks, places, following = self.store.catalog.page(**wanted, start=start, more=more)
        entries = [self._describe(chunk) for chunk in chunks]
        return {"total": total, "chunks": entries, "places": places, "next": following}

    def _start(self, starts: Mapping[int, int] | None) -> int | None:
        """Where this rank continues, None if it is done."""
        return 0 if starts is None else starts.get(self.dp_rank)

    def get(self, tenant: str | None, prefix: str) -> dict[str, Any]:
        """The chunks of a tenant with this id."""
        chunks = self.store.catalog.find(tenant, prefix, chunks_under_way(self.store))
        return {"chunks": [self._describe(chunk) for chunk in chunks]}

    def survey(self, starts: Mapping[int, int] | None, tenant: str | None, everybody: bool) -> dict[str, Any]:
        """A survey of some chunks; see `survey_chunks`. The first one also has the `memory` of device and host (tokens:
        `size`, and `free`, which is None for a tenant, since it tells the lengths of what others compute and lose),
        what was `evicted` of it in the last hour (rows of `Sums`: chunks and tokens), and, among `chunks`, the number
        of `pending` and `fetching` ones.
        """
        if (start := self._start(starts)) is None:
            return {}
        chunks, following = self.store.catalog.scan(tenant, everybody, start, AT_ONCE)
        found = {**survey_chunks(chunks, self._describe), "next": following}
        if starts is None:
            coming = [
                state_of(self.store, chunk)
                for chunk in chunks_under_way(self.store)
                if everybody or chunk.tenant == tenant
            ]
            found["chunks"].update({state: coming.count(state) for state in ("pending", "fetching")})
            device, host = self.store.device, self.store.host
            shows_free = everybody or tenant is None
            found["memory"] = {
                "device": {"size": device.size, "free": device.available_size() if shows_free else None},
                "host": host
                and {
                    "size": host.memory.slots.size,
                    "free": host.memory.slots.num_free if shows_free else None,
                },
            }
            found["evicted"] = self.store.counts.evicted_lately.rows(tenant, everybody, time.time())
        return found

    def delete(self, tenant: str | None, ids: list[str]) -> dict[str, Any]:
        """Delete chunks from the cache, or, while requests hold them, as soon as they are released.

        An ambiguous id is skipped.
        """
        affected, skipped = {}, []
        for prefix in dict.fromkeys(ids):
            try:
                affected[prefix] = self._find(tenant, prefix)
            except ValueError as error:
                skipped.append({"id": prefix, "reason": str(error)})
        for chunks in affected.values():
            self._discard(chunks)
        self.store.deletions.sweep()
        gone = {prefix: all(chunk.node is None for chunk in chunks) for prefix, chunks in affected.items()}
        states = [{"id": prefix, "state": "deleted" if done else "in use"} for prefix, done in gone.items()]
        return {"affected": states, "skipped": skipped}

    def _discard(self, chunks: Iterable[CachedChunk]) -> None:
        for chunk in chunks:
            self.pins.remove(chunk)
            self.store.deletions.add(chunk)

    def forget_adapter(self, adapter: str) -> None:
        """Delete the chunks of an unloaded LoRA adapter, whose id will not recur: nothing could find them again."""
        self._discard(chunk for chunk in list(self.store.catalog) if chunk.key.namespace.adapter == adapter)
        self.store.deletions.sweep()

    def pin(
        self,
        tenant: str | None,
        ids: list[str],
        pin: bool,
        ttl: float | None,
        only: tuple[bool, str | None] | None,
        now: float,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Pin cached chunks, or end their pins.

        ttl: how many seconds the pins last after a hit, None for no limit.
        only: whether the chunk has a preamble, and the id of its adapter, to select one of several copies; None for
            all copies.
        names: what the log calls the chunks that have names, by these ids.
        """
        affected, skipped = [], []
        for prefix in dict.fromkeys(ids):
            try:
                chunks = self._find(tenant, prefix, only)
                if not pin:
                    for chunk in chunks:
                        self.pins.remove(chunk)
                elif any(chunk.key in self.store.deletions.waiting for chunk in chunks):
                    raise ValueError("it is being deleted")
                else:
                    self.pins.add(chunks, ttl, now, names.get(prefix))
            except ValueError as error:
                if isinstance(error, Refusal):
                    self.store.counts.refused[error.reason] += 1
                skipped.append({"id": prefix, "reason": str(error)})
            else:
                until = None if not pin or ttl is None else now + ttl
                affected.append({"id": prefix, "pinned": pin, "pinned_until": until})
        return {"affected": affected, "skipped": skipped, **self.expire(now)}

    def expire(self, now: float) -> dict[str, Any]:
        """End expired pins.  next: in how many seconds another one may expire."""
        return {"next": self.pins.expire(now)}

    def _find(self, tenant: str | None, prefix: str, only: tuple[bool, str | None] | None = None) -> list[CachedChunk]:
        """The cached chunks with this id. Raises ValueError if there are none, or if the id is ambiguous."""
        found = self.store.catalog.find(tenant, prefix)
        chunks = [chunk for chunk in found if only is None or _is_copy(chunk.key.namespace, *only)]
        if not chunks:
            raise ValueError("unknown")
        if len({chunk.key.tokens for chunk in chunks}) > 1:
            raise ValueError("ambiguous: give more digits of the digest")
        return chunks

    def _describe(self, chunk: CachedChunk) -> dict[str, Any]:
        report = describe_chunk(self.store, chunk)
        report["cache_salt"] = chunk.key.namespace.cache_salt
        report["adapter"] = chunk.key.namespace.adapter
        if chunk.last_use:
            report["idle_seconds"] = max(0.0, time.time() - chunk.last_use)
        return report


def _is_copy(namespace: Namespace, has_preamble: bool, adapter: str | None) -> bool:
    """Whether a chunk is this copy. Whole chunks are the same for all adapters."""
    return namespace.kind == "whole" or (namespace.has_preamble, namespace.adapter) == (has_preamble, adapter)

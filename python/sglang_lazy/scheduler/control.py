"""What the scheduler answers to the routes about chunks."""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sglang_lazy.chunks.catalog import CachedChunk, tenant_of
from sglang_lazy.chunks.pins import Pins
from sglang_lazy.chunks.reports import described, state_of, under_way
from sglang_lazy.chunks.rows import RowCache
from sglang_lazy.chunks.survey import PIECE, surveyed
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.refusal import Refusal


class ChunkControl:
    """Acts on the chunks of one tenant; each tensor-parallel rank does the same with the same message.

    What looks at all chunks does so in pieces, each with a message of its own, so that batches go on in between:
    `starts` says at which one each data-parallel rank goes on, None for all of them at the first; the answer's `next`
    where the next one starts, None at the end.

    dp_rank: of the scheduler; the port sets it.
    """

    def __init__(self, rows: RowCache, pins: Pins):
        self.rows, self.store, self.pins = rows, rows.store, pins
        self.dp_rank = 0

    def handle(self, verb: str, arguments: Mapping[str, Any], now: float) -> dict[str, Any]:
        """The answer to one message. Pins whose time is over end first, unless it is one of the many of a survey.

        arguments: checked by the process that sent them.  now: the time there, seconds since the epoch.
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
        """One page of a piece of the chunks, each with its place, and the number of all of them.

        wanted: the arguments of `Catalog.page`, but for the chunks that it does not know.
        """
        if (start := self._start(starts)) is None:
            return {}
        more = under_way(self.store)
        total, chunks, places, following = self.store.catalog.page(**wanted, start=start, more=more)
        described = [self._described(chunk) for chunk in chunks]
        return {"total": total, "chunks": described, "places": places, "next": following}

    def _start(self, starts: Mapping[int, int] | None) -> int | None:
        """Where this rank goes on, None if it is done."""
        return 0 if starts is None else starts.get(self.dp_rank)

    def get(self, tenant: str | None, prefix: str) -> dict[str, Any]:
        """The chunks of a tenant with this id."""
        chunks = self.store.catalog.find(tenant, prefix, under_way(self.store))
        return {"chunks": [self._described(chunk) for chunk in chunks]}

    def survey(self, starts: Mapping[int, int] | None, tenant: str | None, everybody: bool) -> dict[str, Any]:
        """A piece of a survey: see `surveyed`. The first one has `memory`, too: tokens that the device and the host
        hold at most (`size`), and how many more (`free`); and among `chunks`, how many are `pending` and `fetching`.
        """
        if (start := self._start(starts)) is None:
            return {}
        chunks, following = self.store.catalog.piece(tenant, everybody, start, PIECE)
        found = {**surveyed(chunks, self._described), "next": following}
        if starts is None:
            coming = [
                state_of(self.store, chunk)
                for chunk in under_way(self.store)
                if everybody or tenant_of(chunk.key.namespace) == tenant
            ]
            found["chunks"].update({state: coming.count(state) for state in ("pending", "fetching")})
            found["memory"] = {"device": self.store.tree.device_memory, "host": self.store.tree.host_memory}
        return found

    def delete(self, tenant: str | None, ids: list[str]) -> dict[str, Any]:
        """Take chunks out of the cache, those that requests hold when they are released.

        An id that begins several digests is left alone.
        """
        affected, skipped = {}, []
        for prefix in dict.fromkeys(ids):
            try:
                affected[prefix] = self._find(tenant, prefix)
            except ValueError as error:
                skipped.append({"id": prefix, "reason": str(error)})
        for chunks in affected.values():
            self._discard(chunks)
        self.rows.sweep()
        gone = {prefix: all(chunk.node is None for chunk in chunks) for prefix, chunks in affected.items()}
        states = [{"id": prefix, "state": "deleted" if done else "in use"} for prefix, done in gone.items()]
        return {"affected": states, "skipped": skipped}

    def _discard(self, chunks: Iterable[CachedChunk]) -> None:
        for chunk in chunks:
            self.pins.remove(chunk)
            self.store.deletions.add(chunk)

    def forget_adapter(self, adapter: str) -> None:
        """A LoRA adapter is unloaded, and its id will not come back: nobody will find its chunks, pinned or not."""
        self._discard(chunk for chunk in list(self.store.catalog) if chunk.key.namespace.adapter == adapter)
        self.rows.sweep()

    def pin(
        self,
        tenant: str | None,
        ids: list[str],
        pin: bool,
        ttl: float | None,
        only: tuple[bool, str | None] | None,
        now: float,
    ) -> dict[str, Any]:
        """Pin cached chunks, or end their pins.

        ttl: for how many seconds after a hit, None for no end.
        only: that copy of each which was computed behind a preamble, or alone, with the adapter of this id, or without
            one; None for all.
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
                    self.pins.add(chunks, ttl, now)
            except ValueError as error:
                if isinstance(error, Refusal):
                    self.store.counts.refused[error.reason] += 1
                skipped.append({"id": prefix, "reason": str(error)})
            else:
                until = None if not pin or ttl is None else now + ttl
                affected.append({"id": prefix, "pinned": pin, "pinned_until": until})
        return {"affected": affected, "skipped": skipped, **self.expire(now)}

    def expire(self, now: float) -> dict[str, Any]:
        """End the pins whose time is over. next: in how many seconds there may be another."""
        return {"next": self.pins.expire(now)}

    def _find(self, tenant: str | None, prefix: str, only: tuple[bool, str | None] | None = None) -> list[CachedChunk]:
        """The cached chunks with this id. Raises ValueError if there are none, or if it begins several digests."""
        found = self.store.catalog.find(tenant, prefix)
        chunks = [chunk for chunk in found if only is None or _is_copy(chunk.key.namespace, *only)]
        if not chunks:
            raise ValueError("unknown")
        if len({chunk.key.tokens for chunk in chunks}) > 1:
            raise ValueError("ambiguous: give more digits of the digest")
        return chunks

    def _described(self, chunk: CachedChunk) -> dict[str, Any]:
        said = described(self.store, chunk)
        said["cache_salt"] = chunk.key.namespace.cache_salt
        said["adapter"] = chunk.key.namespace.adapter
        if chunk.last_use:
            said["idle_seconds"] = max(0.0, time.time() - chunk.last_use)
        return said


def _is_copy(namespace: Namespace, has_preamble: bool, adapter: str | None) -> bool:
    """Whether a chunk is the one that was computed so. Whole ones are the same for all adapters."""
    return namespace.kind == "whole" or (namespace.has_preamble, namespace.adapter) == (has_preamble, adapter)

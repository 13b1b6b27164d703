"""Reports on chunks for lists. `store` is their `ChunkStore`."""

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any

from sglang_lazy.chunks.catalog import CachedChunk, tenant_of
from sglang_lazy.core.fills import chunks_of
from sglang_lazy.core.keys import chunk_id


def state_of(store: Any, chunk: CachedChunk) -> str:
    """The state of a chunk that is cached or one of `chunks_under_way`: one of `STATES`."""
    if chunk.node is not None:
        return store.state_at(chunk.node).name.lower()
    return "fetching" if chunk.key in store.fetching else "pending"


def chunks_under_way(store: Any) -> list[CachedChunk]:
    """The chunks that are being computed or fetched from storage, and are not cached yet."""
    filled = ((chunk.key, chunk) for work in dict.fromkeys(store.pending.values()) for chunk in chunks_of(work))
    chunks = {key: chunk for key, chunk in (*filled, *((key, asked[0]) for key, asked in store.fetching.items()))}
    own: defaultdict[Hashable, Iterator[int]] = defaultdict(lambda: itertools.count(-1, -1))
    return [
        CachedChunk(key, None, chunk.num_tokens, -1 - i, tenant := tenant_of(key.namespace), next(own[tenant]), 0.0)
        for i, (key, chunk) in enumerate(chunks.items())
        if not store.knows(key)
    ]


def describe_chunk(store: Any, chunk: CachedChunk) -> dict[str, Any]:
    """A chunk's entry in a list, without its namespace; see `docs/chunks.md`."""
    node = chunk.node
    return {
        "id": chunk_id(chunk.key.tokens),
        "digest": chunk.key.tokens.hex(),
        "tokens": chunk.num_tokens,
        "state": state_of(store, chunk),
        "tiers": [
            tier
            for tier, held in (
                ("device", node is not None and node.slots is not None),
                ("host", node is not None and node.host is not None),
            )
            if held
        ],
        "hits": chunk.hits,
        "users": 0 if node is None else node.locks - (chunk.pin is not None),
        "last_use": chunk.last_use or None,
        "pinned": chunk.pin is not None,
        "pinned_until": None if chunk.pin is None else chunk.pin.until,
        "preamble": chunk.key.namespace.has_preamble,
    }

"""Reports on chunks for lists and surveys. `store` is their `ChunkStore`.

A survey is gathered in a scan, between batches: totals, and the top of several lists.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sglang_lazy.chunks.catalog import CachedChunk, tenant_of
from sglang_lazy.chunks.counts import Occupancy
from sglang_lazy.core.fills import chunks_of
from sglang_lazy.core.keys import chunk_id

if TYPE_CHECKING:
    from sglang_lazy.chunks.store import ChunkStore

AT_ONCE = 750
"""How many chunks to survey at once, which takes less than a millisecond."""
TOP = 10
"""Maximum number of chunks in a list."""
SORTED_BY = {"hottest": "hits", "largest": "tokens", "pinned": "tokens"}
"""The lists, and the field of `describe_chunk` that each is sorted by, descending; chunks with 0 are left out."""
_FIELDS = {"hits": "hits", "tokens": "num_tokens"}


def state_of(store: "ChunkStore", chunk: CachedChunk) -> str:
    """The state of a chunk that is cached or one of `chunks_under_way`: one of `STATES`."""
    if chunk.node is not None:
        return store.state_at(chunk.node).name.lower()
    return "fetching" if chunk.key in store.fetching else "pending"


def chunks_under_way(store: "ChunkStore") -> list[CachedChunk]:
    """The chunks that are being computed or fetched from storage, and are not cached yet."""
    filled = ((chunk.key, chunk) for work in dict.fromkeys(store.pending.values()) for chunk in chunks_of(work))
    chunks = {key: chunk for key, chunk in (*filled, *((key, asked[0]) for key, asked in store.fetching.items()))}
    own: defaultdict[Hashable, Iterator[int]] = defaultdict(lambda: itertools.count(-1, -1))
    return [
        CachedChunk(key, None, chunk.num_tokens, -1 - i, tenant := tenant_of(key.namespace), next(own[tenant]), 0.0)
        for i, (key, chunk) in enumerate(chunks.items())
        if not store.knows(key)
    ]


def describe_chunk(store: "ChunkStore", chunk: CachedChunk) -> dict[str, Any]:
    """A chunk's entry in a list, without its namespace; see `docs/chunks.md`."""
    node, states = chunk.node, store.states
    sizes = {}
    if states is not None:
        has_state = node is not None and (states.has(node) or (node.host is not None and node.host.state is not None))
        sizes["state_bytes"] = states.pool.slot_bytes if has_state else 0
    if store.draft_token_bytes:
        sizes["draft_bytes"] = 0 if node is None else chunk.num_tokens * store.draft_token_bytes
    return {
        "id": chunk_id(chunk.key.tokens),
        "digest": chunk.key.tokens.hex(),
        "tokens": chunk.num_tokens,
        **sizes,
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


def survey_chunks(chunks: Sequence[CachedChunk], describe: Callable[[CachedChunk], dict[str, Any]]) -> dict[str, Any]:
    """A survey of `chunks`:

        {"chunks": {"resident": {"chunks": 2, "tokens": 150}, …}, "hottest": […], "largest": […], "pinned": […]}

    chunks: shares by the names in `Occupancy`.
    hottest, largest, pinned: at most `TOP` chunks each, as `describe` gives them.
    """
    found: dict[str, Any] = {"chunks": {name: s._asdict() for name, s in Occupancy.of(chunks)._asdict().items()}}
    for name, sorted_by in SORTED_BY.items():
        field = attrgetter(_FIELDS[sorted_by])
        among = [chunk for chunk in chunks if chunk.pin is not None] if name == "pinned" else chunks
        found[name] = [describe(chunk) for chunk in heapq.nlargest(TOP, among, key=field) if field(chunk)]
    return found

"""A survey of the cached chunks, gathered piece by piece between batches: totals, and the top of several lists."""

import heapq
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from sglang_lazy.chunks.catalog import CachedChunk
from sglang_lazy.chunks.counts import Occupancy

PIECE = 750
"""How many chunks to survey at once, which takes less than a millisecond."""
TOP = 10
"""Maximum number of chunks in a list."""
SORTED_BY = {"hottest": "hits", "largest": "tokens", "pinned": "tokens"}
"""The lists, and the field of `describe_chunk` that each is sorted by, descending; chunks with 0 are left out."""
_FIELDS = {"hits": "hits", "tokens": "num_tokens"}


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

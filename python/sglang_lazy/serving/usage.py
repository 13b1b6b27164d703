"""The most recent prompts and their chunks, as seen by the HTTP process, and their history for the page `/lazy`."""

from collections import Counter, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from sglang_lazy.chunks.catalog import tenant_of
from sglang_lazy.core.keys import Namespace
from sglang_lazy.core.periods import SumsByTenant

MAX_PROMPTS, MAX_REFERENCES = 1000, 50_000
"""How many prompts, and chunks in these prompts, to remember: at most 10 MB."""
SHOWN_PROMPTS, SHOWN_CHUNKS = 12, 40
"""How many prompts a list shows, and how many chunks of each."""


class Prompt(NamedTuple):
    """time: when it was answered, seconds since the epoch.  chunks: id, tokens, and whether it was cached, of each.
    rid: the id of the request."""

    time: float
    namespace: Namespace
    link: str
    chunks: tuple[tuple[str, int, bool], ...]
    rid: str = ""

    def shown(self, only: Collection[str] | None = None) -> dict[str, Any]:
        """The prompt as the page shows it.  only: the ids of the chunks to include, None for all."""
        wanted = (chunk for chunk in self.chunks if only is None or chunk[0] in only)
        return {
            "rid": self.rid,
            "time": self.time,
            "link": self.link,
            "cache_salt": self.namespace.cache_salt,
            "num_chunks": len(self.chunks),
            "chunks": [
                {"id": name, "tokens": tokens, "hit": hit} for name, tokens, hit in islice(wanted, SHOWN_CHUNKS)
            ],
        }


class Usage:
    """The last prompts with chunks, and sums over periods by tenant."""

    def __init__(self) -> None:
        self._prompts: deque[Prompt] = deque()
        self._num_references = 0
        self._sums = SumsByTenant()

    def add(
        self,
        namespace: Namespace,
        link: str,
        chunks: Sequence[Mapping[str, Any]],
        num_reused: int,
        now: float,
        rid: str = "",
    ) -> None:
        """Record an answered prompt.

        namespace: of its chunks.  chunks: its chunk report.
        num_reused: chunk tokens that were not computed for it.  now: seconds since the epoch.
        rid: the id of the request; empty if nobody can ask for it.
        """
        used = tuple((chunk["id"], chunk["tokens"], chunk["hit"]) for chunk in chunks)
        self._prompts.append(Prompt(now, namespace, link, used, rid))
        self._num_references += len(used)
        while len(self._prompts) > MAX_PROMPTS or self._num_references > MAX_REFERENCES:
            self._num_references -= len(self._prompts.popleft().chunks)
        numbers = (1, len(used), sum(hit for _, _, hit in used), sum(tokens for _, tokens, _ in used), num_reused)
        self._sums.add(tenant_of(namespace), numbers, now)

    def history(self, tenant: Hashable, everybody: bool, now: float) -> list[list[int]]:
        """For each period of the last hour with prompts with chunks, in order: its beginning, seconds since the epoch;
        the numbers of prompts, of chunks in them, of cached chunks, of chunk tokens and of reused chunk tokens."""
        return self._sums.rows(tenant, everybody, now)

    def last(self, tenant: Hashable, everybody: bool) -> list[dict[str, Any]]:
        """The last prompts, newest first."""
        return [prompt.shown() for prompt in islice(self._of(tenant, everybody), SHOWN_PROMPTS)]

    def find(self, tenant: Hashable, everybody: bool, rid: str) -> Prompt | None:
        """The last prompt with this id of its request, None if it is not remembered."""
        return next((prompt for prompt in self._of(tenant, everybody) if rid and prompt.rid == rid), None)

    def uses(self, tenant: Hashable, everybody: bool, chunk_id: str) -> dict[str, Any]:
        """The prompts that use a chunk, and the chunks that occur with it.

            {"num_prompts": 7, "prompts": […], "together": [{"id": "0c8e…", "tokens": 64, "prompts": 5}]}

        num_prompts: the number of remembered prompts that have it.
        prompts: the last of these, newest first, reduced to this chunk and those of `together`.
        together: the chunks that occur in most of these prompts, and in how many.
        """
        prompts = [p for p in self._of(tenant, everybody) if any(name == chunk_id for name, _, _ in p.chunks)]
        counts = Counter(pair for p in prompts for pair in {(name, tokens) for name, tokens, _ in p.chunks})
        together: list[dict[str, Any]] = [
            {"id": name, "tokens": tokens, "prompts": count}
            for (name, tokens), count in counts.most_common(SHOWN_PROMPTS + 1)
            if name != chunk_id
        ][:SHOWN_PROMPTS]
        drawn = {chunk_id, *(other["id"] for other in together)}
        shown = [prompt.shown(drawn) for prompt in prompts[:SHOWN_PROMPTS]]
        return {"num_prompts": len(prompts), "prompts": shown, "together": together}

    def _of(self, tenant: Hashable, everybody: bool) -> Iterator[Prompt]:
        return (one for one in reversed(self._prompts) if everybody or tenant_of(one.namespace) == tenant)

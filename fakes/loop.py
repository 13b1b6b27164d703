"""The scheduler over recording pools, checked after every step, with helpers for tests."""

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import Req

from fakes.recorder import RecordingPools
from fakes.requests import CHUNK, TEXT, new_request
from fakes.scheduler import Scheduler
from sglang_lazy.chunks.store import ChunkState
from sglang_lazy.core.state import fill_of, linked
from sglang_lazy.port.scheduler import upkeep

A, B, C, D = ((CHUNK, (i, i + 1, i + 2, i + 3)) for i in (1, 5, 9, 12))
QUESTION = (TEXT, (15,))


class Loop(Scheduler):
    """link: the default policy of requests.  max_fill_tokens: the most tokens in a fill of several chunks.
    scheduler, pools: options of the scheduler and of the pools.
    """

    def __init__(
        self,
        pool_size: int = 100,
        *,
        chunked_prefill_size: int = 64,
        overlap: bool = False,
        link: str = "block",
        max_fill_tokens: int | None = None,
        scheduler: Mapping[str, Any] | None = None,
        **pools: Any,
    ):
        pools = RecordingPools(pool_size, **pools)
        super().__init__(pools, chunked_prefill_size=chunked_prefill_size, overlap=overlap, **(scheduler or {}))
        self.store, self.producer, self.link = self.tree_cache.store, self.admission.producer, link
        self.producer.max_tokens = max_fill_tokens or chunked_prefill_size

    def step(self) -> None:
        super().step()
        self.pools.check(self.admission.holders)

    def submit(self, parts: Iterable[tuple[bool, Sequence[int]]], rid: str, **kwargs) -> Req:
        req = new_request(parts, rid=rid, **{"link": self.link, **kwargs})
        self._add_request_to_queue(req)
        return req

    def warm(self, *chunks: tuple[bool, Sequence[int]]) -> None:
        """Make chunks resident and nothing else."""
        for i, chunk in enumerate(chunks):
            self.submit([chunk, QUESTION], f"warm-{i}", max_new_tokens=1)
            self.run()
        self.log.clear()

    def disturb(self, dice: random.Random) -> set[Req]:
        """Take up to three steps, then abort a waiting request and the one in chunked prefill, each with probability
        0.2. Returns those aborted."""
        aborted = set()
        for _ in range(dice.randint(0, 3)):
            self.step()
        if self.waiting_queue and dice.random() < 0.2:
            aborted.add(req := dice.choice(self.waiting_queue))
            self.abort(req)
        if self.chunked_req is not None and dice.random() < 0.2:
            aborted.add(self.abort_chunked())
        return aborted

    def visible(self) -> list[Req]:
        """The queue as batch formation would see it now."""
        return self.admission.candidates(self.running_batch.reqs)

    def fills(self) -> list[Req]:
        """The fills in progress."""
        return list(dict.fromkeys(self.store.pending.values()))

    def counts(self, req: Req) -> tuple[int, int, int]:
        """What results report for `req`: cached tokens, how many of these are in chunks, and the hit mask."""
        details = upkeep.cached_tokens_details(req, linked(req))
        assert details["device"] + details["host"] + details.get("storage", 0) == req.cached_tokens
        return req.cached_tokens, details["chunk"], int(details["chunk_hits"], 16)

    def resident(self, req: Req) -> list[bool]:
        """Whether each chunk that `req` uses is resident."""
        return [state is ChunkState.RESIDENT for state in self.states(req)]

    def states(self, req: Req) -> list[ChunkState]:
        """The state of each chunk that `req` uses."""
        return [self.store.state(chunk) for chunk in linked(req).prompt.chunks]


def fill_tokens(reqs: Iterable[Req]) -> list[list[tuple[int, ...]]]:
    """The chunks of each fill."""
    return [[tuple(chunk.tokens) for chunk in fill_of(req).chunks] for req in reqs if fill_of(req) is not None]

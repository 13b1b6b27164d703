"""Counts of the host tier and storage, on /metrics with SGLang's own and in the server's state."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from sglang_lazy.cache.host_copy import HostWatcher
from sglang_lazy.cache.node import Node

HOST_COUNTERS = {
    "backup_tokens": "tokens copied from the device to the host",
    "given_up_tokens": "tokens whose copies a full host gave up while the device had them",
}
COUNTERS = {
    "fetch_timeouts": "chunks that requests stopped waiting for",
    "fetch_misses": "chunks that storage did not have, or not whole",
    "unstored": "chunks that storage did not take, or not in time",
}
WAITS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30)
"""Bounds of the histogram of fetches, in seconds."""


@dataclasses.dataclass
class HostReport(HostWatcher):
    """Counts of tokens since the start, of a host tier that it watches.

    count_loaded: counts tokens that are copied back.
    counters: by the names in HOST_COUNTERS, empty if metrics are off.
    """

    count_loaded: Callable[[int], None] = lambda _num_tokens: None
    counters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_backup_tokens: int = 0
    num_given_up_tokens: int = 0

    def copied(self, node: Node) -> None:
        self.num_backup_tokens += len(node)
        _count(self.counters, "backup_tokens", len(node))

    def loaded(self, node: Node) -> None:
        self.count_loaded(len(node))

    def gave_up(self, num_tokens: int) -> None:
        self.num_given_up_tokens += num_tokens
        _count(self.counters, "given_up_tokens", num_tokens)

    def numbers(self) -> dict[str, int]:
        """Tokens since the start."""
        return _numbers(self)


@dataclasses.dataclass
class StorageReport:
    """Counts of chunks since the start.

    token_size: bytes per token.  state_size: bytes of a chunk's state, 0 without states.
    log_stored, log_fetched: take the tokens of a chunk and the speed of its copy in GB/s.
    counters: by the names in COUNTERS, empty if metrics are off.
    waits: observes the seconds from the request to the end of each fetch.
    """

    token_size: int
    state_size: int = 0
    log_stored: Callable[[int, float], None] = lambda _num_tokens, _speed: None
    log_fetched: Callable[[int, float], None] = lambda _num_tokens, _speed: None
    counters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    waits: Callable[[float], None] = lambda _seconds: None
    num_stored: int = 0
    num_unstored: int = 0
    num_fetched: int = 0
    num_missed: int = 0
    num_late: int = 0

    def stored(self, num_tokens: int, seconds: float) -> None:
        """A chunk has been written in `seconds`."""
        self.num_stored += 1
        self.log_stored(num_tokens, self._speed(num_tokens, seconds))

    def unstored(self, count: int = 1) -> None:
        """Chunks have not been written, and will not be."""
        self.num_unstored += count
        _count(self.counters, "unstored", count)

    def fetched(self, num_tokens: int, seconds: float, wait: float) -> None:
        """A chunk has been read in `seconds`, and `wait` seconds after the request for it."""
        self.num_fetched += 1
        self.waits(wait)
        self.log_fetched(num_tokens, self._speed(num_tokens, seconds))

    def missed(self, wait: float) -> None:
        """A chunk was not in storage, which took `wait` seconds to find out."""
        self.num_missed += 1
        self.waits(wait)
        _count(self.counters, "fetch_misses")

    def late(self) -> None:
        """Requests stopped waiting for a chunk."""
        self.num_late += 1
        _count(self.counters, "fetch_timeouts")

    def _speed(self, num_tokens: int, seconds: float) -> float:
        """In GB/s."""
        return (num_tokens * self.token_size + self.state_size) / max(seconds, 1e-9) / 1e9

    def numbers(self) -> dict[str, int]:
        """Chunks since the start."""
        return _numbers(self)


def _count(counters: Mapping[str, Any], name: str, count: int = 1) -> None:
    if name in counters:
        counters[name].inc(count)


def _numbers(report: Any) -> dict[str, int]:
    return {name.removeprefix("num_"): value for name, value in vars(report).items() if name.startswith("num_")}


def counters_of(tier: str, counters: Mapping[str, str], labels: Mapping[str, Any]) -> dict[str, Any]:
    """Counters of a tier on /metrics, by name."""
    from prometheus_client import Counter  # not before SGLang has set up its directory of metrics

    return {
        name: Counter(f"sglang_lazy:{tier}_{name}_total", text, list(labels)).labels(**labels)
        for name, text in counters.items()
    }

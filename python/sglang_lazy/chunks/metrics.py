"""Metrics of chunks, on /metrics with SGLang's own; docs/metrics.md lists them.

The scheduler counts in plain numbers, see `chunks/counts.py`. They are published when SGLang logs its statistics, and
when it is idle.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sglang_lazy.chunks.counts import Census
from sglang_lazy.chunks.store import ChunkStore

COUNTERS = {
    "chunk_references": ("num_references", "chunks in prompts that began to run"),
    "chunk_hits": ("num_hits", "of these, the ones that were cached when the prompt arrived"),
    "reused_chunk_tokens": ("num_reused_tokens", "tokens of cached chunks that prompts did not have to compute"),
    "filled_tokens": ("num_filled_tokens", "tokens computed for missing chunks"),
    "evicted_chunks": ("num_evicted_chunks", "chunks that left the device to make room"),
    "evicted_chunk_tokens": ("num_evicted_tokens", "tokens of chunks that left the device to make room"),
}
"""By metric name, the field of `Counts` and the help text."""
REFUSED = "requests with chunks, and pins, that were refused"
BATCHES = "forward passes, and whether they computed or attended to chunks"
HISTOGRAMS = {
    "fill_seconds": ("fill_seconds", "seconds from forming the first batch of a fill to its result"),
    "chunk_wait_seconds": ("wait_seconds", "seconds that prompts with missing chunks waited for them"),
    "hits_per_chunk": ("hits_per_chunk", "prompts that had found a chunk cached when it left the cache"),
}
GAUGES = {
    "resident": "on the device",
    "pinned": "on the device, and pinned",
    "locked": "on the device, and held by requests or by copies in progress",
    "evictable": "on the device, neither pinned nor locked",
    "host": "in host memory only",
}
"""By field of `Occupancy`, the end of the help texts of `…_chunks` and `…_chunk_tokens`."""
STATE_BYTES = "memory for states of recurrent layers: read by requests (locked), evictable, free"
TIME_SHARE = 1000
"""Publishing takes at most 1/TIME_SHARE of the scheduler's time. Its cost is counted in CPU time: if other processes
interrupted it for a moment, wall time would delay the next publication by a thousand such moments."""


@dataclasses.dataclass
class Followed:
    """A growing number, and the function that adds to its metric."""

    read: Callable[[], float]
    add: Callable[[float], None]
    published: float = 0

    def publish(self) -> None:
        value = self.read()
        if value != self.published:
            self.add(value - self.published)
            self.published = value


class ChunkMetrics:
    """Publishes the counts of one scheduler's store, with these labels.

    clock, cpu_clock: return seconds; those of `cpu_clock` pass only while this thread runs.
    """

    def __init__(
        self,
        store: ChunkStore,
        labels: Mapping[str, Any],
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ):
        import prometheus_client as prometheus  # not before SGLang has set up its directory of metrics

        self._clock, self._cpu_clock, self._due = clock, cpu_clock, 0.0
        self._census = Census(store)
        self._followed: list[Followed] = []
        counts, names = store.counts, list(labels)

        def counter(name: str, text: str, *own: str) -> Callable[..., Any]:
            metric = prometheus.Counter(f"sglang_lazy:{name}_total", text, [*names, *own])
            return lambda *values: metric.labels(**labels, **dict(zip(own, values, strict=True))).inc

        for name, (field, text) in COUNTERS.items():
            self._follow(partial(getattr, counts, field), counter(name, text)())
        refused, batches = counter("refused", REFUSED, "reason"), counter("batches", BATCHES, "mode", "chunks")
        for reason in counts.refused:
            self._follow(partial(counts.refused.__getitem__, reason), refused(reason))
        for mode, chunks in counts.batches:
            self._follow(partial(counts.batches.__getitem__, (mode, chunks)), batches(mode, str(chunks).lower()))
        for name, (field, text) in HISTOGRAMS.items():
            ours = getattr(counts, field)
            theirs = prometheus.Histogram(f"sglang_lazy:{name}", text, names, buckets=ours.bounds).labels(**labels)
            # `Histogram.observe` takes one value at a time.
            for i, bucket in enumerate(theirs._buckets):
                self._follow(partial(ours.counts.__getitem__, i), bucket.inc)
            self._follow(partial(getattr, ours, "total"), theirs._sum.inc)
        self._gauges = [
            prometheus.Gauge(f"sglang_lazy:{name}_{unit}", f"{what} {text}", names, multiprocess_mode="mostrecent")
            .labels(**labels)
            .set
            for name, text in GAUGES.items()
            for unit, what in (("chunks", "chunks"), ("chunk_tokens", "tokens of chunks"))
        ]

        self._states, self._set_state_bytes = store.states, dict[str, Callable[[float], None]]()
        if store.states is not None:
            gauge = prometheus.Gauge(
                "sglang_lazy:state_bytes", STATE_BYTES, [*names, "use"], multiprocess_mode="mostrecent"
            )
            self._set_state_bytes = {use: gauge.labels(**labels, use=use).set for use in store.states.num_bytes}

    def _follow(self, read: Callable[[], float], add: Callable[[float], None]) -> None:
        self._followed.append(Followed(read, add))

    def publish(self) -> None:
        """Publish, unless done a moment ago. Each call counts some chunks; gauges are set after the last ones."""
        if self._clock() < self._due:
            return
        start = self._cpu_clock()
        for followed in self._followed:
            followed.publish()
        if self._states is not None:
            for use, number in self._states.num_bytes.items():
                self._set_state_bytes[use](number)
        if (shares := self._census.step()) is not None:
            for set_gauge, number in zip(self._gauges, [number for share in shares for number in share], strict=True):
                set_gauge(number)
        self._due = self._clock() + TIME_SHARE * (self._cpu_clock() - start)

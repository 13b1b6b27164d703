"""From timelines to numbers: SGLang's serving metrics, hit rates, saturation, and the server's own counters."""

import collections
import dataclasses
import itertools
import re
import statistics
import types

import requests

from benchmark.serving.client import Timeline
from benchmark.serving.sglang_bench import DatasetRow, RequestFuncOutput, calculate_metrics

LATENCIES = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "itl_ms": "itl_ms", "e2e_ms": "e2e_latency_ms"}
"""Our names and SGLang's."""
STATISTICS = {"mean": "mean", "p50": "median", "p90": "p90", "p99": "p99"}
THROUGHPUTS = ("request_throughput", "input_throughput", "output_throughput", "total_throughput", "concurrency")


def sglang_output(timeline: Timeline) -> RequestFuncOutput:
    """A timeline as SGLang's client would have recorded it: an event of n tokens counts as n equal intervals."""
    intervals = []
    for (before, count_before), (after, count_after) in itertools.pairwise(timeline.arrivals):
        new = count_after - count_before
        intervals += [(after - before) / new] * new
    return RequestFuncOutput(
        success=True,
        start_time=timeline.sent,
        ttft=timeline.arrivals[0][0] - timeline.sent,
        latency=timeline.arrivals[-1][0] - timeline.sent,
        itl=intervals,
        prompt_len=timeline.prompt_tokens,
        output_len=timeline.output_tokens,
    )


def summarise(stages: list[list[Timeline]]) -> dict:
    """The metrics of requests that were sent in one or more stages. Times in ms, throughputs per second.

    Throughputs count the time from a stage's first send to its last token.
    """
    timelines = [timeline for stage in stages for timeline in stage]
    durations = [last_arrival(stage) - min(timeline.sent for timeline in stage) for stage in stages]
    duration = sum(durations)
    no_tokenizer = types.SimpleNamespace(encode=lambda text, add_special_tokens: [])  # tokens are counted by the server
    found, _ = calculate_metrics(
        [DatasetRow(None, timeline.prompt_tokens, timeline.output_tokens) for timeline in timelines],
        [sglang_output(timeline) for timeline in timelines],
        duration,
        no_tokenizer,
        "sglang",
    )
    found = dataclasses.asdict(found)
    prompt_tokens = sum(timeline.prompt_tokens for timeline in timelines)
    return {
        "requests": len(timelines),
        "duration_s": round(duration, 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(timeline.output_tokens for timeline in timelines),
        "hit_rate": round(sum(timeline.cached_tokens for timeline in timelines) / prompt_tokens, 4),
        "chunk_hit_rate": round(sum(timeline.chunk_tokens for timeline in timelines) / prompt_tokens, 4),
        **{name: round(float(found[name]), 3) for name in THROUGHPUTS},
        **{
            f"{ours}_{statistic}": round(float(found[f"{theirs}_{name}"]), 3)
            for ours, name in LATENCIES.items()
            for statistic, theirs in STATISTICS.items()
        },
        "ttft_ms_turns": [round(1000 * statistics.median(times), 3) for times in ttft_by_turn(timelines)],
        "ttft_ms_stages": [round(mean_ttft(stage) * 1000, 3) for stage in stages],
        "duration_s_stages": [round(seconds, 4) for seconds in durations],
    }


def ttft_by_turn(timelines: list[Timeline]) -> list[list[float]]:
    """Seconds to the first token of the first turns of conversations, of the second, and so on."""
    times: list[list[float]] = [[] for _ in range(max(timeline.turn for timeline in timelines))]
    for timeline in timelines:
        times[timeline.turn - 1].append(timeline.arrivals[0][0] - timeline.sent)
    return times


def mean_ttft(timelines: list[Timeline]) -> float:
    return statistics.fmean(timeline.arrivals[0][0] - timeline.sent for timeline in timelines)


def last_arrival(timelines: list[Timeline]) -> float:
    return max(timeline.arrivals[-1][0] for timeline in timelines)


def is_saturated(timelines: list[Timeline]) -> bool:
    """Whether the server fell behind: it finished more than a quarter of the sending time after the last request was
    sent, not counting the duration of its fastest request."""
    sends = [timeline.sent for timeline in timelines]
    fastest = min(timeline.arrivals[-1][0] - timeline.sent for timeline in timelines)
    return last_arrival(timelines) - max(sends) > fastest + (max(sends) - min(sends)) / 4


class ServerGauges:
    """Counters and gauges of a server started with --enable-metrics."""

    def __init__(self, url: str):
        self.url = url
        self.pool_tokens: int = requests.get(f"{url}/server_info", timeout=60).json()["max_total_num_tokens"]
        self._seen = self._samples()

    def new_tokens(self) -> collections.Counter:
        """`cached` and `prompt` tokens of requests that finished since the last call."""
        before, self._seen = self._seen, self._samples()
        totals = {"cached": "sglang:cached_tokens_total", "prompt": "sglang:prompt_tokens_total"}
        return collections.Counter({name: self._seen[total] - before[total] for name, total in totals.items()})

    def resident_tokens(self) -> int:
        """Tokens whose KV is resident, in use or not, as of the last batch that the server logged."""
        return self.pool_tokens - round(self._samples()["sglang:kv_available_tokens"])

    def _samples(self) -> dict[str, float]:
        """The value of each sample, summed over labels."""
        totals: dict[str, float] = collections.defaultdict(float)
        for line in requests.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if match := re.match(r"([a-zA-Z_:]+)(?:\{.*\})? ([^ ]+)", line):
                totals[match[1]] += float(match[2])
        return totals

"""Measures the runs of a contender against a server that is up."""

import collections
import itertools
import math
from collections.abc import Iterator

import examples_path  # noqa: F401 - puts examples on the path
from case import Run
from contenders import CONTENDERS
from load import send
from metrics import ServerGauges, is_saturated, summarise
from serving import Client

WARM_UP_CONVERSATIONS = 2


def measure_all(url: str, name: str, runs: list[Run], seed: int, kv_bytes: int) -> Iterator[dict]:
    """The rows of one contender. A case ends with the first rate that it cannot follow.

    kv_bytes: bytes of KV of one token.
    """
    gauges = ServerGauges(url)
    for _, rates in itertools.groupby(runs, key=lambda run: id(run.case)):
        for run in rates:
            rows = measure(url, name, run, seed, gauges, kv_bytes)
            yield from rows
            if any(row["saturated"] for row in rows if row["phase"] != "cold"):
                break


def measure(url: str, name: str, run: Run, seed: int, gauges: ServerGauges, kv_bytes: int) -> list[dict]:
    """A row for each phase of a run, which starts from an empty cache."""
    how = dict(form=CONTENDERS[name].form, max_concurrency=run.case.max_concurrency, seed=seed)
    # The first requests of a kind are slower: kernels are compiled, buffers are allocated.
    send(url, run.stages[0].conversations[:WARM_UP_CONVERSATIONS], request_rate=math.inf, **how)
    Client(url).flush_cache()
    gauges.new_tokens()
    timelines, facts, tokens = {}, {}, collections.defaultdict(collections.Counter)
    for stage in run.stages:
        sent = send(url, stage.conversations, request_rate=run.request_rate, **how)
        timelines.setdefault(stage.phase, []).append(sent)
        tokens[stage.phase] += gauges.new_tokens()
        facts[stage.phase] = {
            "server_hit_rate": round(tokens[stage.phase]["cached"] / tokens[stage.phase]["prompt"], 4),
            "kv_resident_bytes": gauges.resident_tokens() * kv_bytes,
            "kv_pool_bytes": gauges.pool_tokens * kv_bytes,
            "saturated": is_saturated(sent),
        }
    return [
        {**run.describe(), "phase": phase, **summarise(stages), **facts[phase]} for phase, stages in timelines.items()
    ]
